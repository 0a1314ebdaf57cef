"""`assert_attention`: somebody's attention function against the reference, on problems that break kernels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, Unpack

import numpy as np

from clearhead.core.arrays import FLOATS
from clearhead.core.axes import KEY, QUERY, VALUE, named
from clearhead.core.rule_values import is_whole, listed, read_flag, read_number, whole_number
from clearhead.core.rules import RULES, Rules, check_names
from clearhead.diagnosing.diagnose import diagnose
from clearhead.errors import ClearheadError, DtypeError, RuleError, ShapeError, check_known, needing, shown
from clearhead.testing.drawing import KINDS, WIDTHS, Draws, Plan, planned, possible_kinds, smaller
from clearhead.testing.judging import Arrays, Caller, Failure, Layout, judged

_SHRINKS = 150  # calls of the function while a failing problem is made smaller
_DTYPES = {dtype.name: dtype for dtype in FLOATS}
_SIZES = "lengths=[1, 64, 100], widths=[64, (40, 24)]"
_LONGEST = 100_000  # queries, keys or columns of a drawn problem
_SINGLE = ("scale", "softcap", "causal", "window", "query_offset")  # rules whose value may fit every size


def assert_attention(
    fn: Callable[..., Any],
    *,
    optional: Sequence[str] = (),
    kinds: Iterable[str] = tuple(KINDS),
    dtypes: Sequence[str] = ("float32",),
    arrays: Arrays = "numpy",
    layout: Layout = "bhnd",
    device: str = "cpu",
    lengths: Sequence[int] | None = None,
    widths: Sequence[int | tuple[int, int]] = WIDTHS,
    grouped: bool = True,
    gradients: bool = False,
    examples: int = 50,
    seed: int | None = None,
    smallest: bool = True,
    **rules: Unpack[Rules],
) -> None:
    """Assert that fn(q, k, v, **rules) computes attention: the float64 reference, to within a plain run's rounding.

    Problems are drawn at random: odd sizes, grouped heads, one query, many keys, large, growing and equal scores, rows
    that see no key, NaN where nobody may look (`KINDS` has them all). An output passes where no number is further off
    than four times the worst error of a plain run in the coarser of its dtype and q's. A problem that fails is drawn
    again with smaller sizes as long as it fails in the same way.

    fn         called with q (batch, heads, queries, d_k), k (batch, kv_heads, keys, d_k), v (batch, kv_heads, keys,
               d_v) and the problem's rules as keywords, as in `attention`; returns (batch, heads, queries, d_v)
    rules      of every problem: a value that fits all sizes (causal=True, scale=0.3, window=(5, 0)), or True to have
               one drawn (mask=True). query_offset may be a function of (queries, keys); without it, causal and
               windowed problems have as many queries as keys
    optional   names of rules that some problems have, alone and together
    kinds      which of KINDS; those that need a rule that is not there are left out
    dtypes     of q, k and v: "float32", "bfloat16", "float16", "float64"
    arrays     what fn takes: "numpy", "torch" or "jax"
    layout     "bhnd", or "bnhd" where q, k, v and the result have heads behind tokens; masks stay heads first
    device     of tensors: "cuda" for kernels that run there
    lengths    the numbers of queries and keys to draw from; None: 1 to 129, and about 2,000 keys at times
    widths     the head widths to draw from: d, or (d_k, d_v)
    grouped    may several query heads share a key head?
    gradients  compare the derivatives of q, k and v too; for tensors
    examples   how many problems, kind after kind
    seed       draw just the problem of this seed, as the message of a failure says; None: fresh problems each time
    smallest   look for smaller problems that fail in the same way: up to 150 more calls of fn, each with new sizes

    Raises AssertionError where an output is wrong, or fn raises: it says what was given, how far off the result is in
    units of a plain run's error, the first wrong number, what `diagnose` makes of it, and the seed. Raises RuleError,
    DtypeError or UnknownNameError where the arguments make no sense, MissingExtraError where a library is missing.
    Each problem costs O(queries·keys·d) in float64, and at most 300,000 weights.

    >>> import numpy as np, clearhead as ch
    >>> def mine(q, k, v, causal=False):
    ...     s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    ...     s = np.where(np.tri(*s.shape[-2:]) > 0, s, -np.inf) if causal else s
    ...     a = np.exp(s - s.max(-1, keepdims=True))
    ...     return a / a.sum(-1, keepdims=True) @ v
    >>> ch.testing.assert_attention(mine, optional=["causal"], grouped=False, examples=20)
    """
    caller = _caller(fn, arrays, layout, device, gradients=gradients)
    draws = _draws(rules, optional, kinds, dtypes, lengths, widths, grouped=read_flag("grouped", grouped))
    whole_number("examples", examples, hint="examples=50")
    read_flag("smallest", smallest)
    first = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else whole_number("seed", seed, 0)

    def tried(plan: Plan) -> Failure | None:
        failure = judged(caller, draws, plan)
        if failure is None and gradients:
            from clearhead.testing.gradients import gradients_judged

            return gradients_judged(caller, draws, plan)
        return failure

    for place in range(examples if seed is None else 1):
        failure = tried(planned(draws, first + place))
        if failure is not None:
            if seed is None:
                failure = _clearest(tried, draws, failure)
            small = _shrunk(tried, draws, failure) if smallest else failure
            raise AssertionError(_message(caller, failure, small)) from failure.error


def _caller(fn: Any, arrays: Any, layout: Any, device: str, *, gradients: Any) -> Caller:
    if not callable(fn):
        raise DtypeError(f"fn is {shown(fn)}: expected a function of q, k, v and rules.", "assert_attention(my_kernel)")
    for name, value, known in (("arrays", arrays, ("numpy", "torch", "jax")), ("layout", layout, ("bhnd", "bnhd"))):
        check_known(name, [value], known)
    if read_flag("gradients", gradients) and arrays != "torch":
        raise RuleError(f'gradients=True with arrays="{arrays}": only tensors have them.', 'arrays="torch"')
    with needing("a package", f'arrays="{arrays}"', arrays):
        import_module(arrays)
    return Caller(fn, arrays, layout, device)


def _draws(rules: Rules, optional: Any, kinds: Any, dtypes: Any, lengths: Any, widths: Any, *, grouped: bool) -> Draws:
    check_names(rules)
    optional = _names("optional", optional, RULES)
    kinds, dtypes = _names("kinds", kinds, KINDS), _names("dtypes", dtypes, _DTYPES)
    for name, value in rules.items():
        if not (value is None or isinstance(value, bool) or name in _SINGLE):
            raise RuleError(f"{name} is {shown(value)}: its size differs from problem to problem.", f"{name}=True")
    fixed = {name: value for name, value in rules.items() if value is not None and value is not False}
    if "scale" in fixed and fixed["scale"] is not True and not callable(fixed["scale"]):
        fixed["scale"] = read_number("scale", fixed["scale"], 1.0)
    segments = {"query_segments", "kv_segments"}
    fixed |= dict.fromkeys(segments if segments & fixed.keys() else (), True)
    chosen = optional + (("query_segments",) if "kv_segments" in optional else ())
    chosen = tuple(name for name in dict.fromkeys(chosen) if name not in fixed and name != "kv_segments")
    sizes = None if lengths is None else _sizes("lengths", lengths)
    pairs: Any = [_sizes("widths", [w, w] if is_whole(w) else w) for w in _list("widths", widths)]
    if not pairs or any(len(pair) != 2 for pair in pairs) or sizes == ():
        raise ShapeError("lengths or widths hold no sizes to draw from.", _SIZES)
    draws = Draws(fixed, chosen, kinds, tuple(_DTYPES[name] for name in dtypes), sizes, tuple(pairs), grouped)
    if not draws.dtypes or not possible_kinds(draws):
        raise RuleError("no problem is left to draw: these rules and sizes allow none of the kinds.")
    return draws


def _list(argument: str, value: Any) -> list[Any]:
    """A list of sizes. Raises RuleError for what is none."""
    try:
        return listed(None if isinstance(value, Mapping) else value)
    except TypeError:
        raise RuleError(f"{argument} is {shown(value)}: expected a list of whole numbers.", _SIZES) from None


def _sizes(argument: str, value: Any) -> tuple[int, ...]:
    return tuple(whole_number("a size", size, 1, _LONGEST) for size in _list(argument, value))


def _names(argument: str, value: Any, known: Mapping[str, Any]) -> tuple[str, ...]:
    """A list of names. Raises RuleError for what is none, UnknownNameError for another name."""
    try:
        names = listed(value)
    except TypeError:
        hint = f"{argument}=[{value!r}]" if isinstance(value, str) else f"{argument}=[{next(iter(known))!r}]"
        raise RuleError(f"{argument} is {shown(value)}: expected a list of names.", hint) from None
    check_known(f"name in {argument}:", names, known)
    return tuple(names)


def _clearest(tried: Callable[[Plan], Failure | None], draws: Draws, failure: Failure) -> Failure:
    """Of some problems that fail in the same way the one with the most weights, which tells mistakes apart best."""
    step = len(possible_kinds(draws))
    for seed in range(failure.plan.seed + step, failure.plan.seed + 9 * step, step):
        result = tried(planned(draws, seed))
        if result is not None and result.kind == failure.kind and result.weights > failure.weights:
            failure = result
    return failure


def _shrunk(tried: Callable[[Plan], Failure | None], draws: Draws, failure: Failure) -> Failure:
    """The smallest problem found that fails in the same way."""
    plans = smaller(draws, failure.plan)
    for _ in range(_SHRINKS):
        plan = next(plans, None)
        result = None if plan is None else tried(plan)
        if result is not None and result.kind == failure.kind:
            failure, plans = result, smaller(draws, result.plan)
    return failure


def _message(caller: Caller, failure: Failure, small: Failure) -> str:
    """Everything that somebody needs to find the mistake."""
    lines = [f"{caller.name} is wrong. The kind of problem: {failure.plan.kind} ({KINDS[failure.plan.kind]})."]
    lines += [*_described(failure), *failure.lines]
    if small.plan != failure.plan:
        lines += ["", "the smallest problem that fails in the same way:", *_described(small), *small.lines]
    if failure.theirs is not None:
        problem = failure.problem
        try:
            said = diagnose(problem.q, problem.k, problem.v, failure.theirs, **problem.rules).told()
        except ClearheadError as error:
            said = f"nothing: {error.one_line()}"
        lines += ["", "what ch.diagnose says about the first problem:", *(f"  {line}" for line in said.splitlines())]
    lines += ["", f"to repeat just this problem, add to the call: seed={failure.plan.seed}"]
    return "\n".join(lines)


def _described(failure: Failure) -> list[str]:
    problem = failure.problem
    axes = {"q": QUERY, "k": KEY, "v": VALUE}
    inputs = ", ".join(f"{name} {named(getattr(problem, name).shape, axis)}" for name, axis in axes.items())
    rules = ", ".join(f"{name}={_brief(value)}" for name, value in problem.rules.items()) or "none"
    return [f"given: {inputs}, {problem.q.dtype}", f"rules: {rules}"]


def _brief(value: Any) -> str:
    if isinstance(value, tuple) and any(isinstance(part, np.ndarray) for part in value):
        return f"({', '.join(map(_brief, value))})"
    if isinstance(value, np.ndarray):
        return str(value.tolist()) if value.size <= 4 else f"{value.dtype} {value.shape}"
    return repr(value)
