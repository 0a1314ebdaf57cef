"""Attention and its observations inside JAX's transformations: jax.jit, jax.grad, jax.vmap, jax.lax.scan, on the CPU.

from clearhead.jax import attention, observe
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Unpack

from clearhead.errors import MissingExtraError

try:
    import jax
except ImportError as error:
    raise MissingExtraError(f"clearhead.jax needs JAX: {error}.", "pip install 'clearhead[jax]'") from None
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from clearhead import engines
from clearhead.core.arrays import as_array, as_rule_array
from clearhead.core.axes import Array, as_slice
from clearhead.core.observations import check_asked, check_room, wanted
from clearhead.core.problem import Problem, describe
from clearhead.core.rule_values import has_axes, read_slice
from clearhead.core.rules import RULES, Rules, check_names, flat, joined
from clearhead.core.statistics import STATISTICS, Asked, Wanted, arrays_of, askable, explained
from clearhead.engines.base import kinds
from clearhead.errors import RuleError, SelectionError, shown
from clearhead.ops import backward
from clearhead.ops.jax_host import Kind, call, reverse_only
from clearhead.ops.observation import Observation, observation

_TABLE = "spans[2]"
_WITH_GRADIENTS = ("q", "k", "v", "bias", "sinks", _TABLE)
_ARRAYS = {name for name, rule in RULES.items() if any(rule.fields.values())} - {"scale", "spans"} | {
    "spans[0]",
    "spans[1]",
    _TABLE,
}  # fmt: skip  rules that JAX may trace
jax.tree_util.register_dataclass(
    Observation, data_fields=[*STATISTICS], meta_fields=["queries", "keys", "sinks"]
)  # so that functions under jax.jit and jax.vmap can return one


class Named(Asked, Rules, total=False):
    """The keywords of `observe`: what to observe, and the score rules."""


def attention(q: Any, k: Any, v: Any, *, engine: str | None = None, **rules: Unpack[Rules]) -> jax.Array:
    """`clearhead.attention` that JAX can trace: softmax(scale·q·kᵀ + …)·v, exactly; the weights are never stored.

    q        (…, heads, queries, d_k), or (queries, d_k); float32, bfloat16, float16, or float64 with jax_enable_x64
    k        (…, kv_heads, keys, d_k); heads is a multiple of kv_heads
    v        (…, kv_heads, keys, d_v)
    engine   run this engine or raise EngineError with its reasons; None chooses the fastest that can
    rules    the score rules of `clearhead.attention`, with its words and meanings

    jax.nn.dot_product_attention has its axes in another order, (batch, length, heads, d): swap axes 1 and 2.

    `bias`, `alibi_slopes`, `spans`, `mask`, the lengths, segments, `sinks` and `query_offset` may be traced, that is,
    arguments of the transformed function. `scale`, `softcap`, `causal` and `window` are Python values; so is whatever
    else is not traced, and a compiled function keeps it as it was at tracing. NumPy arrays for q, k and v are read as
    jnp.asarray reads them.

    Returns a JAX array, (…, heads, queries, d_v) in q's dtype, with the same bits as `clearhead.attention`. A row with
    nothing to attend to gives 0.
    Raises, while JAX traces, what `clearhead.attention` raises, and RuleError for a traced `scale`, `softcap`, `causal`
    or `window`. What is wrong with a traced rule's values is found when the compiled function runs: JAX then raises its
    own error with the same words. EngineError when it is compiled for another device than the CPU.
    The output has derivatives by q, k, v, bias, sinks and the table of spans, of first order and in reverse mode
    (jax.grad, jax.vjp, jax.jacrev); second order and forward mode raise DerivativeError, alibi_slopes RuleError.
    jax.vmap makes one call per element of the mapped axis; a batch axis of q, k and v is faster for short sequences.
    O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory, for the gradients too.
    Source: Vaswani et al. 2017, section 3.2.1.

    >>> import jax, jax.numpy as jnp
    >>> from clearhead.jax import attention
    >>> q, k = jnp.zeros((2, 4)), jnp.zeros((2, 4))
    >>> jax.jit(jax.grad(lambda v: attention(q, k, v, causal=True).sum()))(jnp.eye(2))
    Array([[1.5, 1.5],
           [0.5, 0.5]], dtype=float32)
    """
    check_names(rules)
    if v is None:
        as_array(v, "v")  # raises: it is no array
    return observe(q, k, v, engine=engine, **rules).output


@explained(askable())
def observe(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    queries: slice = slice(None),
    engine: str | None = None,
    **named: Unpack[Named],
) -> Observation:
    """`AttentionMatrix(q, k, **rules).observe(v, **asked)` that JAX can trace: statistics in one pass or two.

        STATISTICS

    q, k, v, engine and the score rules as `attention`; v requests the output as well. `queries` restricts everything to
    some queries, as in `AttentionMatrix.observe`. What is asked for is known while JAX traces: the labels of groups
    cannot be traced.

    Returns an Observation of JAX arrays, None for what was not asked for; it is a pytree. The statistics are float32,
    or float64 for float64, and top's indices JAX's default integer. Under jax.vmap each array has the mapped axis too.
    Raises what `attention` and `AttentionMatrix.observe` raise, while JAX traces. Every statistic has derivatives by q,
    k, bias, sinks and the table of spans, and the output by v too.
    Time O(queries·keys·(d_k + d_v)), memory O(queries + keys), whatever is observed.

    >>> import jax, jax.numpy as jnp
    >>> from clearhead.jax import observe
    >>> seen = jax.jit(lambda x: observe(x, x, causal=True, entropy=True, received=True))(jnp.zeros((2, 4)))
    >>> seen.received, seen.peak is None
    (Array([1.5, 0.5], dtype=float32), True)
    """
    rules: Rules = {name: value for name, value in named.items() if name in RULES}  # type: ignore[assignment]
    asked = check_asked({name: x for name, x in named.items() if name not in RULES}, others=("queries", *RULES))
    if not isinstance(queries, slice):
        raise SelectionError(f"queries is {shown(queries)}: expected a slice.", "queries=slice(-64, None)")
    traced, operands = _read(q, k, v, rules, asked, queries, engine)
    answers = dict(zip(traced.arrays(), _observe(traced, *operands), strict=True))
    problem = traced.problem
    return observation(answers, problem.queries, problem.keys, sinks=problem.sinks is not None)


@dataclass(frozen=True, eq=False, repr=False)
class _Call:
    """What is known of a call while JAX traces it."""

    names: tuple[str, ...]  # of the arrays that come when it runs: q, k, v where it is given, and traced rules
    rules: Rules  # those that are not traced
    problem: Problem  # of the chosen queries; traced rules are zeros in it
    d_v: int
    rows: range
    queries: int  # of q, chosen or not
    want: Wanted
    engine: str | None

    def arrays(self, want: Wanted | None = None) -> list[str]:
        """The names of the arrays that answer what is wanted."""
        return [array for name in (want or self.want).names() for array in arrays_of(name)]

    def kinds(self, want: Wanted) -> list[Kind]:
        """Their shapes and dtypes."""
        found = kinds(self.problem, want, want.names(), frozenset(STATISTICS), self.d_v)
        each = (found[name] for name in self.arrays(want))
        return [((*self.problem.prefix, *shape[2:]), dtype) for shape, dtype in each]

    def read(self, arrays: Sequence[Array]) -> tuple[Problem, Array, Array, Array | None]:
        """The problem of the chosen queries, with its arrays (batch, heads, …), now that the numbers are there."""
        given = dict(zip(self.names, arrays, strict=True))
        q, k, v = (given.pop(name, None) for name in "qkv")
        read = describe(q, k, v, joined({**self.rules, **given}))
        return read.problem.take(queries=self.rows), read.q[:, :, as_slice(self.rows)], read.k, read.v


def _read(
    q: Any, k: Any, v: Any, rules: Rules, asked: Mapping[str, Any], queries: slice, engine: str | None
) -> tuple[_Call, list[Any]]:
    """Validate all that is known while JAX traces; the arrays are those that `_Call.names` lists."""
    operands = {name: _as_jax(x, name) for name, x in (("q", q), ("k", k), ("v", v)) if name != "v" or x is not None}
    values = flat(rules)
    operands |= {name: _array_rule(name, x) for name, x in values.items() if isinstance(x, Tracer)}
    tracing = any(isinstance(x, Tracer) for x in operands.values())
    fixed: Any = {name: _fixed(name, x, copy=tracing) for name, x in values.items() if name not in operands}
    zeros: Any = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in operands.items()}
    shaped = [zeros.pop(name, None) for name in "qkv"]
    whole = describe(shaped[0], shaped[1], shaped[2], joined({**fixed, **zeros})).problem
    rows = read_slice("queries", queries, whole.queries)
    problem, want = whole.take(queries=rows), wanted(whole, asked, output=v is not None).for_queries(rows)
    engines.choose(whole, engine, want)
    d_v = 0 if v is None else operands["v"].shape[-1]
    check_room(problem, want, d_v)
    for name in {"bias", _TABLE} & operands.keys():
        operands[name] = _with_all_axes(operands[name], whole.prefix)
    guarded = [
        reverse_only(x) if isinstance(x, Tracer) and name in _WITH_GRADIENTS else x for name, x in operands.items()
    ]
    return _Call(tuple(operands), fixed, problem, d_v, rows, whole.queries, want, engine), guarded


def _as_jax(x: Any, name: str) -> Any:
    return x if isinstance(x, jax.Array) else jnp.asarray(as_array(x, name, "cpu")[0])


def _array_rule(name: str, x: Any) -> Any:
    """A traced value of a rule. Raises RuleError for a rule that is a Python value."""
    if name not in _ARRAYS:
        raise RuleError(
            f"{name} is traced by JAX, and must be known while it traces.",
            "scale=1.0 and (q * scale, k) give the same scores."
            if name == "scale"
            else f"jax.jit(…, static_argnames={name!r}) makes it a Python value.",
        )
    return x


def _fixed(name: str, x: Any, *, copy: bool) -> Any:
    """A rule's value that is not traced; a copy for a compiled function, which keeps it."""
    if x is None or isinstance(x, (int, float)) or not (name in _ARRAYS or (name == "scale" and has_axes(x))):
        return x
    array = as_rule_array(x, name)
    return array.copy() if copy else array


def _with_all_axes(x: Any, prefix: tuple[int, ...]) -> Any:
    """A bias or table with every leading axis; its batch axes are all of size 1, or all whole."""
    own = x.reshape((1,) * (len(prefix) + 2 - x.ndim) + x.shape)
    shared = all(size == 1 for size in own.shape[:-3])
    return own if shared else jnp.broadcast_to(own, (*prefix[:-1], *own.shape[-3:]))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observe(traced: _Call, *operands: Any) -> tuple[Any, ...]:
    """The arrays that answer what is wanted, in the order of their names."""
    return tuple(_called(traced, traced.want, operands))


def _called(traced: _Call, want: Wanted, operands: Sequence[Any]) -> list[Any]:
    return call(partial(_answers, traced, want), traced.kinds(want), *operands) if want.names() else []


def _answers(traced: _Call, want: Wanted, *arrays: Array) -> list[Array]:
    problem, q, k, v = traced.read(arrays)
    engine = engines.get(engines.choose(problem, traced.engine, want).engine)
    found = engines.answer(engine, problem, q, k, v, want)
    return [problem.restore(found[name]) for name in traced.arrays(want)]


def _forward(traced: _Call, *given: Any) -> tuple[Any, Any]:
    """The answers, and what the backward pass reads: operands, answers, and the names of what needs a gradient."""
    operands = [x.value for x in given]
    moving = [name for name, x in zip(traced.names, given, strict=True) if x.perturbed]
    if "alibi_slopes" in moving:
        raise RuleError(
            "alibi_slopes is differentiated, and has no derivative here.",
            "jax.lax.stop_gradient(alibi_slopes), or put them in `bias`.",
        )
    engines.choose_for("gradients", traced.problem, traced.engine)
    want = replace(traced.want, logsumexp=True)
    found = dict(zip(traced.arrays(want), _called(traced, want, operands), strict=True))
    known = {name: x for name, x in found.items() if name in backward.READS}
    return tuple(found[name] for name in traced.arrays()), (operands, known, dict.fromkeys(moving))


def _backward(traced: _Call, kept: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    operands, known, moving = kept
    by = {name: x for name, x in zip(traced.arrays(), cotangents, strict=True) if not _is_zero(x)}
    backward.check_derivatives(by)
    needed = [name for name in _WITH_GRADIENTS if name in moving and (name != "v" or "output" in by)]
    if not by or not needed:
        return (None,) * len(traced.names)
    like = {name: (x.shape, x.dtype) for name, x in zip(traced.names, operands, strict=True)}
    function = partial(_gradients, traced, needed, [*known], [*by])
    found = call(function, [like[name] for name in needed], *operands, *known.values(), *by.values())
    places = dict(zip(needed, found, strict=True))
    return tuple(places.get(name) for name in traced.names)


_observe.defvjp(_forward, _backward, symbolic_zeros=True)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero) or cotangent.dtype == jax.dtypes.float0


def _gradients(
    traced: _Call, needed: Sequence[str], known: Sequence[str], by: Sequence[str], *arrays: Array
) -> list[Array]:
    """The gradients of the operands `needed`, each in its operand's shape."""
    count = len(traced.names)
    given = dict(zip(traced.names, arrays, strict=False))
    problem, q, k, v = traced.read(arrays[:count])
    rest = [x.reshape(problem.batch, problem.heads, *x.shape[len(problem.prefix) :]) for x in arrays[count:]]
    answers, slopes = dict(zip(known, rest, strict=False)), dict(zip(by, rest[len(known) :], strict=True))
    shapes: dict[str, Any] = {}
    for name in {"bias", _TABLE} & {*needed}:
        own = (1,) * (4 - given[name].ndim) + given[name].shape
        height = problem.queries if name == "bias" and own[-2] > 1 else own[-2]
        shapes[name.removesuffix("[2]")] = prod(own[:-3]), own[-3], height, own[-1]
    engine = engines.get(engines.choose_for("gradients", problem, traced.engine).engine)
    found = backward.gradients(engine, problem, (q, k, v), answers, slopes, groups=traced.want.groups, **shapes)
    if _TABLE in needed:
        found[_TABLE] = found["spans"]
    for name in {"q", "bias"} & {*needed}:
        if given[name].shape[-2] == traced.queries:
            found[name] = _among(found[name], traced.rows, traced.queries)
    return [found[name].reshape(given[name].shape) for name in needed]


def _among(part: Array, rows: range, queries: int) -> Array:
    """Rows of the chosen queries among all queries; the others are zero."""
    if rows == range(queries):
        return part
    full = np.zeros((*part.shape[:-2], queries, part.shape[-1]), part.dtype)
    full[..., as_slice(rows), :] = part
    return full
