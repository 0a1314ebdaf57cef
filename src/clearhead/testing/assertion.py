"""`assert_attention`: compares an attention function with the definition, on problems that break kernels."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from math import prod
from typing import Any, Unpack

import numpy as np

from clearhead.core.arrays import FLOATS
from clearhead.core.axes import KEY, QUERY, VALUE, named
from clearhead.core.rule_values import is_whole, read_flag, whole_number
from clearhead.core.rules import RULES, Rules, check_names, with_options
from clearhead.diagnosing.diagnose import diagnose
from clearhead.errors import ClearheadError, DtypeError, RuleError, check_known, needing, shown
from clearhead.testing.drawing import KINDS, NEEDED, SIZES, WIDTHS, ProblemPlan, parts, planned
from clearhead.testing.judging import Failure, judged

_DTYPES = {dtype.name: dtype for dtype in FLOATS}
_HINT = 'kinds=["usual"], dtypes=["float16", ("float32", "float16")]'


@with_options
def assert_attention(
    fn: Callable[..., Any],
    *,
    optional: Iterable[str] = (),
    kinds: Iterable[str] = tuple(KINDS),
    dtypes: Iterable[str | tuple[str, str]] = ("float32",),
    arrays: str = "numpy",
    lengths: Iterable[int] | None = None,
    widths: Iterable[int | tuple[int, int]] = WIDTHS,
    grouped: bool = True,
    gradients: bool = False,
    examples: int | Iterable[int] = 50,
    **rules: Unpack[Rules],
) -> None:
    """Assert that fn(q, k, v, **rules) computes attention up to rounding, without side effects.

    Draws problems at random: odd sizes, grouped heads, one query, many keys, large and growing scores, rows that see no
    key, NaN behind the mask (`KINDS` lists them). Calls fn three times on each: then with other numbers in equal
    shapes, then with these numbers in the first call's arrays. Its inputs, masks included, and its earlier results must
    not change. A number passes if its error is at most four times what rounding explains in the coarser of its dtype
    and q's.

    fn         called with q (batch, heads, queries, d_k), k (batch, kv_heads, keys, d_k), v (batch, kv_heads, keys,
               d_v) and the problem's rules as keywords, as in `attention`; returns (batch, heads, queries, d_v)
    rules      the rules of every problem: a value that fits all sizes (causal=True, scale=0.3, window=(5, 0)), True to
               draw one (mask=True), or a function of (queries, keys). Without query_offset, causal and windowed
               problems have as many queries as keys
    optional   names of rules that only some problems have, alone and together
    kinds      the kinds to draw, from KINDS; kinds that need a missing rule are skipped
    dtypes     "float32", "bfloat16", "float16", "float64", for inputs and result, or pairs (inputs, result)
    arrays     what fn takes: "numpy", "torch" (on the CPU) or "cuda"
    lengths    the numbers of queries and keys to draw from; None: 1 to 129, and sometimes 1,000 to 2,047 keys
    widths     the head widths to draw from: d, or (d_k, d_v)
    grouped    may several query heads share a key head?
    gradients  compare the gradients of q, k and v too; needs tensors
    examples   how many problems to draw, or a list of seeds, as a failure's message gives them

    Raises AssertionError if a result is wrong or fn raises. It describes the smallest wrong problem, with its error and
    seed, the causes over all wrong problems, and what the right ones have in common. Raises RuleError, DtypeError or
    UnknownNameError for arguments that make no sense, MissingExtraError without PyTorch.
    O(queries·keys·d) in float64 for each problem, which has 300,000 weights at most.

    >>> import numpy as np, clearhead as ch
    >>> def mine(q, k, v, causal=False):
    ...     s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]).astype(q.dtype)
    ...     s = np.where(np.tri(*s.shape[-2:]) > 0, s, np.float32(-np.inf)) if causal else s
    ...     a = np.exp(s - s.max(-1, keepdims=True))
    ...     return a / a.sum(-1, keepdims=True) @ v
    >>> ch.testing.assert_attention(mine, optional=["causal"], grouped=False, examples=20)
    """
    if not callable(fn):
        raise DtypeError(f"fn is {shown(fn)}: expected a function of q, k, v and rules.", "assert_attention(my_kernel)")
    check_known("arrays", [arrays], ("numpy", "torch", "cuda"))
    if read_flag("gradients", gradients) and arrays == "numpy":
        raise RuleError('gradients=True with arrays="numpy": only tensors have gradients.', 'arrays="torch"')
    with needing("PyTorch", f'arrays="{arrays}"', "torch"):
        library = import_module("numpy" if arrays == "numpy" else "torch")
    if arrays == "cuda" and not library.cuda.is_available():
        raise RuleError('arrays="cuda": PyTorch has no CUDA device here.', 'arrays="torch"')
    given = {"optional": optional, "kinds": kinds, "dtypes": dtypes, "lengths": lengths or (), "widths": widths}
    alone = {name for name, x in given.items() if isinstance(x, str) or not isinstance(x, Iterable)}
    listed: Any = {name: (x,) if name in alone else tuple(x) for name, x in given.items()}
    plan_of = _drawing(rules, **listed, grouped=read_flag("grouped", grouped))
    first = int(np.random.SeedSequence().generate_state(1)[0])
    seeds: Any = range(first, first + whole_number("examples", examples)) if is_whole(examples) else examples
    right, wrong = list[ProblemPlan](), list[Failure]()
    for seed in seeds:
        failure = judged(fn, arrays, plan := plan_of(seed), gradients=gradients)
        if failure is None:
            right.append(plan)
        else:
            wrong.append(failure)
    if wrong:
        smallest = min(wrong, key=lambda failure: prod(failure.plan.pairs))
        raise AssertionError(_message(fn, smallest, wrong, right)) from smallest.error


def _drawing(rules: Rules, *, kinds: Any, dtypes: Any, **options: Any) -> Callable[[int], ProblemPlan]:
    """Check the arguments of `assert_attention` and return a function from a seed to its plan."""
    check_names(rules)
    fixed = {name: value for name, value in rules.items() if value is not None and value is not False}
    both = dtypes, options["widths"]
    pairs, options["widths"] = ([x if isinstance(x, (tuple, list)) else (x, x) for x in one] for one in both)
    check_known("name in optional:", options["optional"], RULES)
    check_known("name in kinds:", kinds, KINDS)
    check_known("name in dtypes:", [name for pair in pairs for name in pair], _DTYPES)
    kinds = tuple(x for x in kinds if x not in NEEDED or not NEEDED[x].isdisjoint({*fixed, *options["optional"]}))
    if not kinds or not pairs:
        raise RuleError("no problem is left to draw from these rules, kinds and dtypes.", _HINT)
    return partial(planned, rules=fixed, kinds=kinds, dtypes=[(_DTYPES[a], _DTYPES[b]) for a, b in pairs], **options)


def _message(fn: Any, failure: Failure, wrong: Sequence[Failure], right: Sequence[ProblemPlan]) -> str:
    """Write the failure's message: everything needed to find the mistake."""
    kind, shapes = failure.plan.kind, zip("qkv", parts(failure.problem)[0], (QUERY, KEY, VALUE), strict=True)
    rules = [(name, x) for name, x in failure.problem.items() if name not in "qkv"]
    shown_rules = (f"{n}={f'{x.dtype} {x.shape}' if isinstance(x, np.ndarray) else repr(x)}" for n, x in rules)
    known = 2 * sum(bool(one.causes) for one in wrong) >= len(wrong)  # causes of a few may be chance
    causes = Counter(cause for one in wrong for cause in one.causes).most_common(2) if known else []
    lines = [
        f"{getattr(fn, '__name__', type(fn).__name__)} is wrong in {len(wrong)} of {len(wrong) + len(right)} problems.",
        f"the smallest: {kind} ({KINDS[kind]})",
        f"given: {', '.join(f'{name} {named(x.shape, axes)}' for name, x, axes in shapes)}, {failure.plan.dtype}",
        f"rules: {', '.join(shown_rules) or 'none'}",
        *failure.lines,
        *(f"cause, in {times} of {len(wrong)}: {cause}" for cause, times in causes),
        *_in_common(wrong, right),
    ]
    unknown = [one for one in wrong if one.theirs is not None and not one.causes]
    if unknown:
        largest = max(unknown, key=lambda one: prod(one.plan.pairs))
        (q, k, v), given = parts(largest.problem)
        try:
            said = diagnose(q, k, v, largest.theirs, **given).told()
        except ClearheadError as error:
            said = f"nothing: {error.one_line()}"
        lines += ["", f"what ch.diagnose says about seed {largest.plan.seed}:"]
        lines += [f"  {line}" for line in said.splitlines()]
    return "\n".join([*lines, "", f"to repeat just this problem, add to the call: examples=[{failure.plan.seed}]"])


def _in_common(wrong: Sequence[Failure], right: Sequence[ProblemPlan]) -> Iterator[str]:
    """Yield what wrong problems have and most right ones lack: a rule, a kind, or a size from some number on."""

    def of(plan: ProblemPlan) -> Counter[str]:
        return Counter({**{size: getattr(plan, size) for size in SIZES}, plan.kind: 1, **dict.fromkeys(plan.names, 1)})

    for name in (*SIZES, *KINDS, *RULES):
        least = min(of(failure.plan)[name] for failure in wrong)
        others = sum(of(plan)[name] < least for plan in right)
        if others > max(2, len(right) / 2):
            what = f"with {name} below {least}" if name in SIZES else f"without {name}"
            yield f"all {others} problems {what} are right"
