"""Attention and its observations inside JAX's transformations: jit, grad, jvp, hessian, vmap, scan, on the CPU.

from clearhead.jax import attention, observe
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from clearhead.errors import needing

with needing("JAX", "clearhead.jax", "jax"):
    import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from clearhead import engines
from clearhead.core import room
from clearhead.core.arrays import as_array, as_rule_array
from clearhead.core.observations import check_asked, check_room, wanted
from clearhead.core.problem import describe
from clearhead.core.rule_values import has_axes, read_slice
from clearhead.core.rules import RULES, Rules, check_names, flat, joined
from clearhead.core.statistics import STATISTICS, Asked, askable, explained
from clearhead.errors import DtypeError, RuleError, SelectionError, shown
from clearhead.ops.jax_call import TABLE, Traced
from clearhead.ops.jax_derivatives import called
from clearhead.ops.observation import Observation, observation

_ARRAYS = {name for name, rule in RULES.items() if any(rule.fields.values())} - {"scale", "spans"} | {
    "spans[0]",
    "spans[1]",
    TABLE,
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
    The output has derivatives by q, k, v, bias, sinks and the table of spans, of first and second order, in reverse and
    in forward mode (jax.grad, jax.jvp, jax.linearize, jax.hessian); a third one and the derivative of a tangent
    (jax.jvp of jax.jvp) raise DerivativeError, alibi_slopes RuleError. jax.vmap makes one call of the mapped axis;
    where sinks or alibi_slopes are mapped, and for gradients by sinks, it makes one call per element.
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
    q: Any, k: Any, v: Any = None, *, queries: slice = slice(None), engine: str | None = None, **named: Unpack[Named]
) -> Observation:
    """`AttentionMatrix(q, k, **rules).observe(v, **asked)` that JAX can trace: statistics in one pass or two.

        STATISTICS

    q, k, v, engine and the score rules as `attention`; v requests the output as well. `queries` restricts everything to
    some queries, as in `AttentionMatrix.observe`. What is asked for is known while JAX traces: the labels of groups
    cannot be traced.

    Returns an Observation of JAX arrays, None for what was not asked for; it is a pytree. The statistics are float32,
    or float64 for float64, and top's indices JAX's default integer. Under jax.vmap each array has the mapped axis too.
    Raises what `attention` and `AttentionMatrix.observe` raise, while JAX traces. Every statistic has derivatives by q,
    k, bias, sinks and the table of spans, and the output by v too; max_logit, peak and top only gradients.
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
    answers, problem = called(traced, operands), traced.problem
    if np.ndim(q) == 2:
        answers = {name: x[0] for name, x in answers.items()}
    return observation(answers, problem.queries, problem.keys, sinks=problem.sinks is not None)


def _read(
    q: Any, k: Any, v: Any, rules: Rules, asked: Mapping[str, Any], queries: slice, engine: str | None
) -> tuple[Traced, list[Any]]:
    """Validate all that is known while JAX traces; the arrays are those that `Traced.names` lists."""
    operands = {name: _as_jax(x, name) for name, x in (("q", q), ("k", k), ("v", v)) if name != "v" or x is not None}
    values = flat(rules)
    operands |= {name: x for name, x in values.items() if isinstance(x, Tracer)}
    for name in [name for name in values if name in operands and name not in _ARRAYS]:
        raise RuleError(
            f"{name} is traced by JAX, and must be known while it traces.",
            "scale=1.0 and (q * scale, k) give the same scores."
            if name == "scale"
            else f"jax.jit(…, static_argnames={name!r}) makes it a Python value.",
        )
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
    if whole.prefix == ():  # one head gets its axis
        problem = replace(problem, prefix=(1,))
        operands |= {name: operands[name][None] for name in "qkv" if name in operands}
        for name in ("alibi_slopes", "sinks"):
            if name in operands:
                operands[name] = operands[name].reshape(1)
            elif fixed.get(name) is not None:
                fixed[name] = np.reshape(fixed[name], 1)
    for name in {"bias", "mask", TABLE} & operands.keys():
        x = operands[name]
        operands[name] = x.reshape((1,) * (len(problem.prefix) + 2 - x.ndim) + x.shape)
    batch = problem.prefix[:-1]
    return Traced(tuple(operands), fixed, batch, problem, d_v, rows, whole.queries, want, engine), [*operands.values()]


def _as_jax(x: Any, name: str) -> Any:
    if isinstance(x, jax.Array):
        return x
    array = as_array(x, name, "cpu")[0]
    room.check_room(f"{name} as a JAX array", array.nbytes, "give fewer tokens.")
    try:
        return jnp.asarray(array)
    except TypeError:
        raise DtypeError(f"{name} is {array.dtype}: JAX has no arrays of it.", f"{name}.astype(np.float32)") from None


def _fixed(name: str, x: Any, *, copy: bool) -> Any:
    """A rule's value that is not traced; a copy for a compiled function, which keeps it."""
    if x is None or isinstance(x, (int, float)) or not (name in _ARRAYS or (name == "scale" and has_axes(x))):
        return x
    array = as_rule_array(x, name)
    return array.copy() if copy else array
