"""Prints a trace: every step with formula, shape and numbers, and a verdict on every claim; and a diagnosis."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from clearhead.core.axes import Array, named
from clearhead.diagnosing.claims import CheckedExample, Verdict, is_consequence
from clearhead.diagnosing.verdict import Diagnosis
from clearhead.digits import fixed
from clearhead.errors import SelectionError
from clearhead.report.cells import columns, figure, label, note, title
from clearhead.report.console import put
from clearhead.report.explained import sum_words
from clearhead.report.heat import matrix
from clearhead.report.streams import bare, spelled
from clearhead.textbook.computed import differences
from clearhead.textbook.shapes import Step, turned
from clearhead.words import Language, formula, say

_ROWS, _COLS = 8, 8
_BOUNDS = 4  # entries of a query's output that are shown between their bounds
_NOUNS = {"batch": ("batch", "batch entries"), "head": ("head", "heads"), "query": ("query", "queries")}
_STYLES = {"did": "bold", "mend": "green", "note": "dim"}
_VERDICTS = {"right": "bold green", "mistake": "bold red", "ambiguous": "bold red", "unexplained": "bold yellow"}


Place = tuple[int, int, int]  # the batch entry, head and query that are printed; the leading axes count as one batch


def chosen(case: CheckedExample, batch: int | None, head: int | None, query: int | None = None) -> Place:
    """Choose batch entry, head and query: those asked for, else where the first wrong claim is furthest off.

    They are 0 if no claim is wrong. Raises SelectionError for a batch entry, head or query that does not exist.
    """
    problem = case.trace.problem
    sizes = (problem.batch, problem.heads, problem.queries)
    for name, value, size in zip(_NOUNS, (batch, head, query), sizes, strict=True):
        if value is not None and not 0 <= value < size:
            what = f"{_NOUNS[name][0]} {value} is outside 0..{size - 1}"
            raise SelectionError(f"{what}: the file has {size} {_NOUNS[name][size != 1]}.")
    worst = _worst(case)
    return tuple(w if value is None else value for w, value in zip(worst, (batch, head, query), strict=True))  # type: ignore[return-value]


def show(console: Console, case: CheckedExample, language: Language, place: Place) -> None:
    """Print every step, and at the end, where it stays on the screen, what is wrong with the claims."""
    verdicts = {verdict.name: verdict for verdict in case.verdicts}
    for step in case.trace.steps:
        put(console, _step(console, case, step, place, verdicts.get(step.name), language))
        console.print()
    put(console, _one_query(case, place, language))
    put(console, _closing(case, language, place))


def _by_head(case: CheckedExample, array: Any) -> Array:
    """Return a step's array as (batch, heads, …), float64; it may have key heads instead, or 1 for joined heads."""
    numbers = np.asarray(array, dtype=np.float64)
    return numbers.reshape(case.trace.problem.batch, -1, *numbers.shape[-2:])


def _matrix(case: CheckedExample, array: Any, place: Place) -> Array:
    """Return the matrix of an array that is printed."""
    problem, heads = case.trace.problem, _by_head(case, array)[place[0]]
    index = {problem.kv_heads: problem.kv_head_of(place[1]), problem.heads: place[1]}.get(len(heads), 0)
    return np.asarray(heads[index])


def _worst(case: CheckedExample) -> Place:
    """Find where the first wrong claim is furthest off."""
    wrong, problem = case.first_wrong, case.trace.problem
    if wrong is None or not wrong.truth.size:
        return 0, 0, 0
    off = _by_head(case, differences(wrong.claimed, wrong.truth))
    batch, head, *cell = (int(place) for place in np.unravel_index(off.argmax(), off.shape))
    axes_of = {step.name: step.axes for step in case.trace.steps}
    axes = axes_of.get(wrong.name, axes_of["weights"])  # an unused step, such as capped, has the axes of weights
    query = dict(zip(axes[-2:], cell, strict=True)).get("queries", 0)
    return batch, head * problem.group if "kv_heads" in axes else head, query


def _step(
    console: Console, case: CheckedExample, step: Step, place: Place, verdict: Verdict | None, language: Language
) -> Iterator[Text]:
    yield title(f"{formula(language, step.formula)}   {named(step.shape, step.axes)}")
    yield note(f"  {say(language, step.words)}")
    if 0 in step.shape:
        return
    array = _matrix(case, step.array, place)
    if step.name == "weights":
        axes, masked = (
            zip(step.axes[-2:], array.shape, strict=True),
            np.isneginf(_matrix(case, case.trace.masked, place)),
        )
        rows, cols = ([_name(case, axis, i) for i in range(size)] for axis, size in axes)
        yield from matrix(console, array, masked, rows, cols, language)
        in_rows = case.trace.convention == "rows"
        axis = -1 if in_rows else -2  # the axis of a query's weights
        sums = array.sum(axis=axis)[~masked.all(axis=axis)]
        said = sum_words(language, sums, rows=in_rows, sinks=case.trace.problem.sinks is not None)
        yield note("  " + say(language, "axes" if in_rows else "axes columns") + say(language, "also") + said)
    else:
        yield from _grid(console, array, language, _rows_of(case, step))
    if verdict is not None:
        yield from _verdict(console, case, step, place, verdict, language)


def _rows_of(case: CheckedExample, step: Step) -> Sequence[str] | None:
    """Return the tokens of this step's rows, if the file names them and rows are tokens."""
    return {"queries": case.tokens, "keys": case.sources}.get(step.axes[-2])


def _name(case: CheckedExample, axis: str, place: int) -> str:
    """Name a query or key by its token, or q_0, k_0 if the file names none."""
    names = case.tokens if axis == "queries" else case.sources
    return f"{'q' if axis == 'queries' else 'k'}_{place}" if names is None else names[place]


def _grid(console: Console, array: Array, language: Language, names: Sequence[str] | None = None) -> Iterator[Text]:
    """Print a matrix, or the first rows and columns of a large one; with the names of its rows, if any."""
    lead = 0 if names is None else min(10, max(cell_len(bare(name)) for name in names[:_ROWS])) + 1
    part = array[:_ROWS, : min(_COLS, max(1, (console.width - 1 - lead) // 9))]
    decimals = 4 if np.abs(part[np.isfinite(part)]).max(initial=0) < 100 else 2
    for place, row in enumerate(part):
        name = "" if names is None else label(bare(names[place]), lead - 1)
        yield columns((2 + lead, -8, *[-9] * len(row)), [f"  {name}", *(fixed(float(x), decimals, 8) for x in row)])
    if part.shape != array.shape:
        size = dict(zip(("rows", "cols", "all_rows", "all_cols"), (*part.shape, *array.shape), strict=True))
        yield note("  " + say(language, "cut", **size))


def _verdict(
    console: Console, case: CheckedExample, step: Step, place: Place, verdict: Verdict, language: Language
) -> Iterator[Text]:
    names = _rows_of(case, step)
    if verdict.right:
        yield Text("  " + say(language, "claim right", name=verdict.name), style="green")
        return
    yield Text("  " + say(language, "claim wrong", name=verdict.name, difference=verdict.difference), style="bold red")
    yield from (title(f"    {did}") for did in verdict.did(language))
    if verdict.source and verdict.follows is not None:
        key = "follows" if is_consequence(verdict) else "also off"
        yield Text("    " + say(language, key, source=verdict.source, difference=verdict.off_source))
        if key == "also off":
            yield Text("  " + say(language, "from own", source=verdict.source))
            yield from _grid(console, _matrix(case, verdict.follows, place), language, names)
    claimed, right = (_matrix(case, x, place) for x in (verdict.claimed, verdict.truth))
    if right.shape[0] > _ROWS or right.shape[1] > _COLS:
        row, column = (int(place) for place in np.unravel_index(differences(claimed, right).argmax(), right.shape))
        worst = {"claimed": float(claimed[row, column]), "right": float(right[row, column])}
        yield Text("    " + say(language, "worst", row=row, column=column, **worst))
    for key, array in (("claimed", claimed), ("right", right)):
        yield Text("  " + say(language, key))
        yield from _grid(console, array, language, names)


def _one_query(case: CheckedExample, place: Place, language: Language) -> Iterator[Text]:
    """Print a query's scores as lengths and angles, ‖q‖·‖k‖·cos θ per key, and its output as a sum of values."""
    problem, m, query = case.trace.problem, case.trace.problem.keys, place[2]
    if not problem.queries or not m:
        return
    token = case.trace.token(query)
    rows = token.norm[..., None], token.key_norms, token.cosine, token.scores, token.weights, token.masked, token.output
    norm, *numbers, masked, output = (np.asarray(x).reshape(problem.batch, problem.heads, -1)[place[:2]] for x in rows)
    name = f"{query} {bare(_name(case, 'queries', query))}" if case.tokens else str(query)
    yield title(say(language, "geometry", query=name))
    yield note("  " + say(language, "norm", norm=float(norm[0])))
    heads = [f"  {say(language, 'key')}", "‖k‖", "cos θ", "q·k", say(language, "weight")]
    widths = (14, *[-11] * 4)
    yield columns(widths, heads)
    for j in np.arange(m) if m <= _ROWS else np.argsort(-numbers[-1], kind="stable")[:_ROWS]:
        key = _name(case, "keys", j)
        lead = label(bare(key) if case.sources is None else f"{j} {spelled(key)}", 12)
        cells = [figure(x[j], 4, 11) for x in numbers]
        cells[-1] = say(language, "masked weight") if np.isneginf(masked[j]) else cells[-1]
        yield columns(widths, [f"  {lead}", *cells])
    if m > _ROWS:
        yield note("  " + say(language, "more", count=m - _ROWS))
    yield Text()
    names = None if case.sources is None else [bare(name) for name in case.sources]
    yield title(say(language, "mixture", query=query))
    yield Text(f"  {token.written_out(place[0] * problem.heads + place[1], tokens=names)}")
    if abs(numbers[-1].sum() - 1) < 1e-6 and np.isfinite(output).all():
        v = turned(_matrix(case, case.trace.v, place), case.trace.convention)[numbers[-1] > 0]
        three = list(zip(v.min(axis=0), output, v.max(axis=0), strict=True))[:_BOUNDS]
        bounds = ["≤".join(fixed(float(x), 4, 8) for x in each) for each in three]
        yield note("  " + say(language, "convex combination", bounds=say(language, "separator").join(bounds)))
    if problem.d_k != len(output):
        yield note("  " + say(language, "widths differ", d_k=problem.d_k, d_v=len(output)))
    yield Text()


def _closing(case: CheckedExample, language: Language, place: Place) -> Iterator[Text]:
    """Say what else can be shown, and which claims are wrong, or that all are right."""
    trace, first = case.trace, case.first_wrong
    for which, size, index in (("batches", trace.problem.batch, place[0]), ("heads", trace.problem.heads, place[1])):
        if size > 1:
            yield note(say(language, f"others {which}", index=index, size=size))
    yield note(say(language, "check", engine=trace.engine, difference=trace.difference))
    if not case.verdicts:
        yield Text(say(language, "no claims"))
    elif first is None:
        names = say(language, "separator").join(verdict.name for verdict in case.verdicts)
        yield Text(say(language, "all right", names=names), style="bold green")
    else:
        words = say(language, "first wrong", name=first.name, difference=first.difference)
        yield Text(_with_cause(words, first, language), style="bold red")
        later = (verdict for verdict in case.verdicts if not verdict.right and verdict is not first)
        yield from (Text(_also_wrong(verdict, language), style="red") for verdict in later)


def _also_wrong(verdict: Verdict, language: Language) -> str:
    if verdict.source is None:
        words = say(language, "wrong too", name=verdict.name, difference=verdict.difference)
        return _with_cause(words, verdict, language)
    key = "follows on" if is_consequence(verdict) else "also wrong"
    return say(language, key, name=verdict.name, source=verdict.source, difference=verdict.off_source)


def _with_cause(words: str, verdict: Verdict, language: Language) -> str:
    did = verdict.did(language)
    return f"{words}{say(language, 'because')}{say(language, 'and').join(did)}" if did else words


def show_diagnosis(console: Console, diagnosis: Diagnosis, language: Language) -> None:
    """Print a diagnosis."""
    for kind, text in diagnosis.lines(language):
        style = _VERDICTS[diagnosis.verdict] if kind == "verdict" else _STYLES.get(kind, "")
        put(console, [Text(text, style=style)])
