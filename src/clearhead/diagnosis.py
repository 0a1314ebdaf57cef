"""Your attention is wrong; here is the mistake: what their code did, from its inputs and what it gave."""

from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np

from clearhead.arrays import FLOATS, adopt
from clearhead.axes import WEIGHTS, Array, heads_first, named
from clearhead.casefile import INPUTS, LAYER, half_a_decimal, inputs_of, numbers, precision, read, value_of
from clearhead.diagnosing.fitting import differences
from clearhead.diagnosing.recipe import RIGHT, STAGES, Inputs, Layer, Rotary, Stage
from clearhead.diagnosing.search import Found, Search
from clearhead.diagnosing.verdict import Confidence, Diagnosis, Explanation, Nonfinite, Outcome, Place
from clearhead.errors import DtypeError, FileError, RuleError, ShapeError, shown, unknown
from clearhead.problem import Problem, Rules, check_names, describe, describe_whole
from clearhead.room import array_bytes, check_room
from clearhead.steps import Convention, check_convention, layer_sizes, turned
from clearhead.values import read_flag

_OPTIONS = ("stage", "rotary", "rotary_interleaved")
_KNOWN = (*INPUTS, *LAYER, "num_heads", "convention", "theirs", *_OPTIONS, *Rules.__annotations__)


def diagnose(
    q: Any,
    k: Any,
    v: Any,
    theirs: Any,
    *,
    stage: Stage = "output",
    rotary: float | None = None,
    rotary_interleaved: bool = False,
    **rules: Unpack[Rules],
) -> Diagnosis:
    """What did their code do? Names the mistake, or the two, that give their numbers from these inputs.

    q, k, v   as in `attention`: what their code was given
    theirs    what it gave: the output (…, heads, queries, d_v), or a step on the way, (…, heads, queries, keys)
    stage     "output"; "weights"; "scores" (q·kᵀ before the scale), "scaled", "capped", "biased" or "masked"
    rotary    the base of rotary positions, if q and k are given before rotation: pairs are (i, i + d_k/2),
              or (2i, 2i + 1) with rotary_interleaved=True
    rules     as in `attention`: what their code should have done

    Returns a Diagnosis, which prints as an answer: the verdict, explanations with residual and the line to change,
    the first difference, and what was looked at: up to 4 million weights everything, beyond that a sample of rows.
    Right means: no further from the truth than four times a plain run in the coarser of q's and theirs' dtype, in doubt
    the worst of five such runs.
    Raises as `attention`; ShapeError where theirs does not fit, with the axes to swap where that would help.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> ch.diagnose(q, k, v, q @ k.T, stage="scaled").explanations[0].mistakes
    ('no scale',)
    """
    return judged(_plain(q, k, v, theirs, stage, _rotary(rotary, interleaved=rotary_interleaved), rules))


def diagnose_layer(
    x: Any,
    w_q: Any,
    w_k: Any,
    w_v: Any,
    w_o: Any,
    theirs: Any,
    *,
    num_heads: int = 1,
    context: Any = None,
    b_q: Any = None,
    b_k: Any = None,
    b_v: Any = None,
    b_o: Any = None,
    convention: Convention = "rows",
    stage: Stage = "output",
    rotary: float | None = None,
    rotary_interleaved: bool = False,
    **rules: Unpack[Rules],
) -> Diagnosis:
    """The same for a whole layer: from X by projections, heads and attention to U.

    x, w_q … convention   as in `trace_layer`; w_o may be None
    theirs                U (…, queries, d_out), or with another stage (…, heads, queries, keys)
    stage, rotary, rules  as in `diagnose`; queries and keys are rotated after their projection

    Returns a Diagnosis. Raises as `trace_layer` and `diagnose`.

    >>> import numpy as np, clearhead as ch
    >>> x, w_q, w_k, w_v, w_o = np.random.default_rng(0).standard_normal((5, 4, 4))
    >>> theirs = ch.trace_layer(x, w_q, w_k, w_v, num_heads=2).output
    >>> ch.diagnose_layer(x, w_q, w_k, w_v, w_o, theirs, num_heads=2).explanations[0].mistakes
    ('output projection left out',)
    """
    given = {"w_o": w_o, "context": context, "b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
    arrays = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, **given}
    turns = _rotary(rotary, interleaved=rotary_interleaved)
    return judged(_layer(arrays, theirs, num_heads, convention, stage, turns, rules))


def diagnose_file(path: str | Path) -> Diagnosis:
    """`diagnose` or `diagnose_layer` on a file's values: .json, .npz or .safetensors.

    Raises FileError when the file is missing, malformed or of the wrong form, and what those two raise.
    """
    place = Path(path)
    data = read(place)
    for name in data:
        if name not in _KNOWN:
            raise unknown(f"key in {place.name}:", name, _KNOWN)
    if "theirs" not in data:
        raise FileError(f"{place.name} lacks theirs.", "it is what your code gave for these inputs.")
    written = data.pop("theirs")
    slack = 0.0 if isinstance(written, np.ndarray) else half_a_decimal(written)
    theirs = numbers("theirs", written)
    theirs = theirs if theirs.dtype in FLOATS else theirs.astype(np.float64)
    theirs = theirs if isinstance(written, np.ndarray) else precision(written, theirs)
    stage = data.pop("stage", "output")
    values = {name: value_of(name, value) for name, value in data.items()}
    return examined(place, values, theirs, stage, slack)


def examined(place: Path, values: dict[str, Any], theirs: Array, stage: Any, slack: float) -> Diagnosis:
    """The verdict on a file's values: inputs and rules by their names."""
    values = dict(values)
    needed = inputs_of(place, values)
    stage = str(stage.item()) if isinstance(stage, np.ndarray) and stage.ndim == 0 else stage
    turns = _rotary(values.pop("rotary", None), interleaved=values.pop("rotary_interleaved", False))
    if needed == INPUTS:
        q, k, v = (values.pop(name) for name in INPUTS)
        convention = values.pop("convention", "rows")
        check_convention(convention)
        q, k, v, theirs = (turned(x, convention) for x in (q, k, v, theirs))
        return judged(_plain(q, k, v, theirs, stage, turns, cast("Rules", values)), slack)
    arrays = {name: values.pop(name, None) for name in LAYER}
    heads, convention = values.pop("num_heads", 1), values.pop("convention", "rows")
    return judged(_layer(arrays, theirs, heads, convention, stage, turns, cast("Rules", values)), slack)


@np.errstate(all="ignore")  # wrong recipes overflow and divide by 0
def judged(given: Inputs, slack: float = 0.0) -> Diagnosis:
    """The verdict on checked inputs; `slack` is what printed decimals allow."""
    search = Search(given, slack)
    made = search.wide.exact.answer(RIGHT, search.everything)
    _, tolerance = search.wide.measure(RIGHT, search.everything, made)
    theirs = search.wide.theirs(search.everything)
    apart = differences(theirs, made) if made.shape == theirs.shape else np.full(theirs.shape, inf)
    first = _first(search, apart, theirs, made, tolerance)
    difference = float(apart.max(initial=0.0))
    verdict, explanations = ("right", ()) if first is None else explained(search, difference, tolerance)
    known = {mistake for explanation in explanations for mistake in explanation.found.mistakes}
    hidden = [] if verdict == "unexplained" else search.unseen()
    unseen = tuple(Explanation(f, "ambiguous") for f in hidden if f.mistakes[0] not in known)
    return Diagnosis(verdict, explanations, difference, tolerance, first, search.looked, unseen, _nonfinite(given))


def _nonfinite(given: Inputs) -> tuple[Nonfinite, ...]:
    """The inputs that hold NaN or infinity, which spread into whatever reads them."""
    arrays: dict[str, Any] = {"q": given.q, "k": given.k, "v": given.v}
    if given.layer is not None:
        arrays = {"x": given.layer.x, "context": given.layer.context}
        arrays |= {f"w_{name}": w for name, w in given.layer.w.items()}
        arrays |= {f"b_{name}": b for name, b in given.layer.b.items()}
        if arrays["context"] is arrays["x"] or np.shares_memory(arrays["context"], arrays["x"]):
            del arrays["context"]
    found = []
    for name, array in arrays.items():
        places = np.argwhere(~np.isfinite(array))
        if len(places):
            place = tuple(int(i) for i in places[0])
            joined = 0 if name[1:2] == "_" else max(0, 2 - len(given.problem.prefix))
            found.append(Nonfinite(name, place[joined:], float(array[place]), len(places)))
    return tuple(found)


def explained(search: Search, difference: float, tolerance: float) -> tuple[Outcome, tuple[Explanation, ...]]:
    """What explains wrong numbers: a single mistake before two, and what fits equally together."""
    fitting = search.explanations() if search.wide.given.problem.keys else []  # without keys all recipes give 0
    if not fitting:
        return "unexplained", ()
    best = fitting[0]
    equal = [f for f in fitting if f.residual <= max(2 * best.residual, 0.1 * best.tolerance)]
    alike: dict[Any, list[Found]] = {}
    for found in fitting:
        alike.setdefault((frozenset(found.mistakes), found in equal), []).append(found)
    groups = [(group[0], tuple(group[1:]), same) for (_, same), group in alike.items()]
    several = sum(same for *_, same in groups) > 1
    exact = all(mistake.evidence == "numbers" for mistake in best.mistakes) and best.recipe.tail[0] != "unknown"
    lucky = search.tried * min(1.0, 4 * tolerance / difference) ** (search.wide.given.theirs.size / 2)
    sure: Confidence = "sure" if exact and len(groups) == 1 and lucky < 1e-3 else "likely"
    words = [Explanation(f, "ambiguous" if several and same else "likely", others) for f, others, same in groups]
    if several:
        return "ambiguous", tuple(words)
    return "mistake", (replace(words[0], confidence=sure), *words[1:])


def _plain(q: Any, k: Any, v: Any, theirs: Any, stage: Stage, rotary: Rotary | None, rules: Rules) -> Inputs:
    given, values = describe_whole(q, k, v, rules)
    shape = (*given.problem.prefix, given.problem.queries, values.shape[-1])
    numbers_ = heads_first(_theirs(theirs, shape, given.problem, stage))
    return Inputs(given.problem, given.q, given.k, values, numbers_, stage, None, rotary)


def _layer(
    arrays: dict[str, Any],
    theirs: Any,
    num_heads: int,
    convention: Convention,
    stage: Stage,
    rotary: Rotary | None,
    rules: Rules,
) -> Inputs:
    check_convention(convention)
    check_names(rules)
    arrays = arrays | {"context": arrays["x"] if arrays["context"] is None else arrays["context"]}
    needed = ("x", "w_q", "w_k", "w_v")
    ready = {name: _numbers(a, name) for name, a in arrays.items() if a is not None or name in needed}
    for name in ("x", "context", "w_q", "w_k", "w_v", "w_o"):
        if name in ready and ready[name].ndim < 2:
            raise ShapeError(f"{name} has {ready[name].ndim} axes: expected at least two.")
    w = {name[2:]: turned(a, convention) for name, a in ready.items() if name.startswith("w_")}
    b = {name[2:]: a for name, a in ready.items() if name.startswith("b_")}
    own, source = (turned(ready[name], convention) for name in ("x", "context"))
    out = w["o"].shape if "o" in w else None
    sizes = layer_sizes(own.shape, source.shape, (w["q"].shape, w["k"].shape, w["v"].shape), out, num_heads, convention)
    for name, bias in b.items():
        if name not in w:
            raise RuleError("b_o is given but w_o is not: a bias of the output projection needs one.")
        if bias.shape != w[name].shape[-1:]:
            raise ShapeError(
                f"b_{name} has shape {bias.shape}: expected one number per output column, {w[name].shape[-1:]}."
            )
    kv_heads = sizes.kv_heads or 1
    q, k, v = (  # shapes are all that is asked here: workings projects anew
        np.broadcast_to(np.zeros((), own.dtype), (*sizes.lead, heads, length, width))
        for heads, length, width in (
            (num_heads, sizes.queries, sizes.d_k),
            (kv_heads, sizes.keys, sizes.d_k),
            (kv_heads, sizes.keys, sizes.d_v),
        )
    )
    given = describe(q, k, v, rules)
    assert given.v is not None
    joined = (*sizes.lead, sizes.queries, num_heads * sizes.d_v if out is None else out[1])
    numbers_ = _theirs(turned(adopt(theirs, "theirs")[0], convention), joined, given.problem, stage)
    numbers_ = numbers_.reshape(given.problem.batch, 1 if stage == "output" else num_heads, *numbers_.shape[-2:])
    flat = [array.reshape(prod(sizes.lead), *array.shape[-2:]) for array in (own, source)]
    layer = Layer(flat[0], flat[1], w, b)
    return Inputs(given.problem, given.q, given.k, given.v, numbers_, stage, layer, rotary)


def _numbers(x: Any, name: str) -> Array:
    array: Array = adopt(x, name)[0]
    if array.dtype.kind not in "iuf" and array.dtype not in FLOATS:
        raise DtypeError(f"{name} is {array.dtype}: expected numbers.", f"{name}.astype(np.float32)")
    check_room(f"{name} in float64", array_bytes(array.shape, 8), "give fewer tokens or columns.")
    return array


def _rotary(base: Any, *, interleaved: Any) -> Rotary | None:
    if base is None:
        return None
    number = base if isinstance(base, (int, float, np.integer, np.floating)) and not isinstance(base, bool) else 0.0
    if not 0 < number < inf:
        raise RuleError(
            f"rotary is {shown(base)}: expected the base of the angles, a positive number.", "rotary=10000.0"
        )
    return Rotary(float(number), read_flag("rotary_interleaved", interleaved))


def _theirs(theirs: Any, output: tuple[int, ...], problem: Problem, stage: Stage) -> Array:
    """Their numbers, if they have the shape of that stage; otherwise what would give them that shape."""
    if not isinstance(stage, str) or stage not in STAGES:
        raise RuleError(f"stage is {shown(stage)}: expected one of {', '.join(STAGES)}.")
    array: Array = adopt(theirs, "theirs")[0]
    if array.dtype not in FLOATS:
        raise DtypeError(f"theirs is {array.dtype}: expected float64, float32, bfloat16 or float16.")
    want = output if stage == "output" else problem.shape
    if array.shape == want:
        return array
    axes: tuple[str, ...] = WEIGHTS if stage != "output" else ("batch", "heads", "queries", "d_v")
    if len(output) == len(problem.prefix) + 1:  # a layer's output, its heads joined
        axes = ("batch", "queries", "d_out") if stage == "output" else WEIGHTS
    hint = _hint(array.shape, want, output, problem, stage)
    raise ShapeError(f"theirs has shape {array.shape}: at stage {stage!r} expected {named(want, axes)}.", hint)


def _hint(shape: tuple[int, ...], want: tuple[int, ...], output: tuple[int, ...], problem: Problem, stage: str) -> str:
    if shape == output:
        return 'it has the shape of the output: stage="output".'
    if shape == problem.shape:
        return 'it has the shape of the weights: stage="weights".'
    if shape == (*want[:-2], want[-1], want[-2]):
        return "its last two axes are swapped: theirs.swapaxes(-1, -2)."
    if len(want) > 2 and shape == (*want[:-3], want[-2], want[-3], want[-1]):
        return "it is (batch, queries, heads, …): theirs.swapaxes(-2, -3)."
    if stage == "output" and len(want) > 2 and shape == (*want[:-3], want[-2], want[-3] * want[-1]):
        split = f"*theirs.shape[:-1], {want[-3]}, {want[-1]}"
        return f"its heads are joined: theirs.reshape({split}).swapaxes(-2, -3)."
    if prod(shape) == prod(want):
        return "it has as many numbers: a reshape may do, if their order is right."
    return ""


def _first(search: Search, apart: Array, theirs: Array, right: Array, tolerance: float) -> Place | None:
    """The first place, by batch, head and query, where theirs is further off than rounding goes."""
    off = np.argwhere(apart > tolerance)
    if not len(off):
        return None
    batch, head, row, column = (int(i) for i in off[0])
    return Place(
        search.looked.batches[batch],
        None if search.wide.given.merged else head,
        search.looked.queries[row],
        column,
        float(theirs[batch, head, row, column]),
        float(right[batch, head, row, column]),
    )
