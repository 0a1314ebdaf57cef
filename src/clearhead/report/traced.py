"""A trace in the terminal: every step with formula, shape and numbers, and a verdict on every claim."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from clearhead.core.axes import TRANSPOSED, WEIGHTS, Array, named
from clearhead.diagnosing.claims import CheckedExample, Verdict, gaps, is_consequence
from clearhead.digits import fixed
from clearhead.errors import SelectionError
from clearhead.report.console import put, title
from clearhead.report.explained import figure, fill, matrix_lines, sum_words
from clearhead.report.heat import label
from clearhead.report.streams import printable, shown, spelled
from clearhead.textbook.shapes import Step, turned
from clearhead.textbook.trace_weights import WeightsTrace
from clearhead.words import Language, formula, say

_ROWS, _COLS = 8, 8
_SEPARATOR = {"en": ", ", "zh": "，"}


class Chosen(NamedTuple):
    """The batch entry, the head and the query that are printed; the leading axes count as one batch."""

    batch: int
    head: int
    query: int


def chosen(case: CheckedExample, batch: int | None, head: int | None, query: int | None = None) -> Chosen:
    """The batch entry, head and query that were asked for, else those of the worst number of the first wrong claim.

    Where no claim is wrong they are 0. Raises SelectionError where there is no such batch entry, head or query.
    """
    problem = case.trace.problem
    sizes = {"batch": problem.batch, "head": problem.heads, "query": problem.queries}
    plurals = {"batch": "batch entries", "head": "heads", "query": "queries"}
    for (name, size), value in zip(sizes.items(), (batch, head, query), strict=True):
        if value is not None and not 0 <= value < size:
            count = f"{size} {name if size == 1 else plurals[name]}"
            raise SelectionError(f"{name} {value} is outside 0..{size - 1}: the file has {count}.")
    worst = _worst(case)
    asked = {"batch": batch, "head": head, "query": query}
    return worst._replace(**{name: value for name, value in asked.items() if value is not None})


def show(console: Console, case: CheckedExample, language: Language, place: Chosen) -> None:
    """Print every step, then what is wrong with the claims, so that this stays on the screen."""
    verdicts = {verdict.name: verdict for verdict in case.verdicts}
    for line in _opening(case, language):
        put(console, line)
    for step in case.trace.steps:
        for line in _step(console, _Picture(case, step, place), verdicts.get(step.name), language):
            put(console, line)
        console.print()
    for line in _one_query(case, place, language):
        put(console, line)
    for line in _closing(case, language, place):
        put(console, line)


class _Picture(NamedTuple):
    """One step, and the part of its arrays that is printed."""

    case: CheckedExample
    step: Step
    place: Chosen

    @property
    def lead(self) -> list[tuple[str, int, int]]:
        """The axes before the matrix: name, the index that is printed, the size."""
        problem, step = self.case.trace.problem, self.step
        places = {"heads": self.place.head, "kv_heads": problem.kv_head_of(self.place.head)}
        found = [(name, places[name], size) for name, size in self._axes if name in places]
        batches = prod(size for name, size in self._axes if name not in places)
        return [("batch", self.place.batch, batches), *found] if len(step.shape) > 2 + len(found) else found

    @property
    def _axes(self) -> list[tuple[str, int]]:
        return list(zip(self.step.axes, self.step.shape, strict=True))[:-2]

    def matrix(self, array: Array) -> Array:
        """The printed matrix of an array with this step's axes."""
        lead = self.lead
        flat = np.asarray(array, dtype=np.float64).reshape(*(size for *_, size in lead), *self.step.shape[-2:])
        return np.asarray(flat[tuple(at for _, at, _ in lead)])

    @property
    def masked(self) -> Array:
        """Which cells of the printed weights are forbidden; none where the weights were given."""
        masked = getattr(self.case.trace, "masked", None)
        return np.zeros(self.step.shape[-2:], dtype=bool) if masked is None else np.isneginf(self.matrix(masked))

    @property
    def rows(self) -> Sequence[str] | None:
        """The tokens that the rows of this step belong to, if the file names them and tokens are its rows."""
        return {"queries": self.case.tokens, "keys": self.case.sources}.get(self.step.axes[-2])

    def where(self, language: Language) -> str:
        """Which batch entry and head that is; empty where there is only one."""
        keys = {"batch": "batch of", "heads": "head of", "kv_heads": "key head of"}
        said = []
        for name, at, size in self.lead:
            words = {"batch": at, "batches": size} if name == "batch" else {"head": at, "heads": size}
            said += [say(language, keys[name], **words)] if size > 1 else []
        return _SEPARATOR[language].join(said)


def _worst(case: CheckedExample) -> Chosen:
    """Where the first wrong claim is furthest off."""
    wrong, problem = case.first_wrong, case.trace.problem
    if wrong is None or not wrong.truth.size:
        return Chosen(0, 0, 0)
    off = gaps(wrong.claimed, wrong.truth)
    index = [int(at) for at in np.unravel_index(off.argmax(), off.shape)]
    axes: Sequence[str] = next((s.axes for s in case.trace.steps if s.name == wrong.name), ())
    axes = axes or _axes(case, off.ndim)
    lead = [at for at, name in enumerate(axes) if name == "batch"]
    batch = np.ravel_multi_index([index[at] for at in lead], [off.shape[at] for at in lead]) if lead else 0
    place = dict(zip(axes, index, strict=True))
    head = place.get("heads", place.get("kv_heads", 0) * problem.group)
    return Chosen(int(batch), head, place.get("queries", 0))


def _axes(case: CheckedExample, count: int) -> tuple[str, ...]:
    """The axes of scores and weights, where the step of a claim is not used and so not listed."""
    last = WEIGHTS[-2:] if case.trace.convention == "rows" else TRANSPOSED[-2:]
    return (*("batch",) * (count - 3), *WEIGHTS[1:2][: max(0, count - 2)], *last)


def _opening(case: CheckedExample, language: Language) -> Iterator[Text]:
    """A sentence on how three axes were read, where that was ambiguous."""
    if told := case.trace.read_as(language):
        yield Text(told, style="dim")
        yield Text()


def _step(console: Console, picture: _Picture, verdict: Verdict | None, language: Language) -> Iterator[Text]:
    case, step = picture.case, picture.step
    yield title(f"{formula(language, step.formula)}   {named(step.shape, step.axes)}")
    yield Text(f"  {say(language, step.words)}", style="dim")
    if where := picture.where(language):
        yield Text(f"  {where}", style="dim")
    if 0 in step.shape:
        return
    array = picture.matrix(step.array)
    if step.name == "weights":
        rows, cols = (
            [_name(case, axis, i) for i in range(n)] for axis, n in zip(step.axes[-2:], array.shape, strict=True)
        )
        yield from matrix_lines(console, array, picture.masked, rows, cols, language)
        yield Text("  " + _sums(picture, array, language), style="dim")
    else:
        yield from table(console, array, language, picture.rows)
    if verdict is not None:
        yield from _verdict(console, picture, verdict, language)


def _name(case: CheckedExample, axis: str, place: int) -> str:
    """A query's or key's token, or q_0, k_0 where the file names none."""
    names = case.tokens if axis == "queries" else case.sources
    return f"{'q' if axis == 'queries' else 'k'}_{place}" if names is None else names[place]


def _sums(picture: _Picture, weights: Array, language: Language) -> str:
    """Which axis is which, and what each query's weights sum to: rows, or in columns convention columns."""
    rows = picture.case.trace.convention == "rows"
    axis = -1 if rows else -2
    sums = weights.sum(axis=axis)[~picture.masked.all(axis=axis)]
    sinks = picture.case.trace.problem.sinks is not None
    axes = say(language, "axes" if rows else "axes columns")
    return axes + say(language, "also") + sum_words(language, sums, rows=rows, sinks=sinks)


def table(console: Console, array: Array, language: Language, names: Sequence[str] | None = None) -> Iterator[Text]:
    """The numbers of a matrix, its first rows and columns where it is large; with the names of its rows, if any."""
    lead = 0 if names is None else min(10, max(cell_len(printable(name.strip())) for name in names[:_ROWS])) + 1
    part = array[:_ROWS, : min(_COLS, max(1, (console.width - 1 - lead) // 9))]
    decimals = 4 if np.abs(part[np.isfinite(part)]).max(initial=0) < 100 else 2
    for place, row in enumerate(part):
        name = "" if names is None else f"{label(names[place], lead - 1)} "
        yield Text(f"  {name}" + " ".join(f"{shown(fixed(float(value), decimals, 8)):>8}" for value in row))
    if part.shape != array.shape:
        size = dict(zip(("rows", "cols", "all_rows", "all_cols"), (*part.shape, *array.shape), strict=True))
        yield Text("  " + say(language, "cut", **size), style="dim")


def _verdict(console: Console, picture: _Picture, verdict: Verdict, language: Language) -> Iterator[Text]:
    if verdict.right:
        yield Text("  " + say(language, "claim right", name=verdict.name), style="green")
        return
    yield Text("  " + say(language, "claim wrong", name=verdict.name, difference=verdict.difference), style="bold red")
    for did in verdict.did(language):
        yield Text("    " + did, style="bold")
    if verdict.source and verdict.follows is not None:
        key = "follows" if is_consequence(verdict) else "also off"
        yield Text("    " + say(language, key, source=verdict.source, difference=verdict.off_source))
        if key == "also off":
            yield Text("  " + say(language, "from own", source=verdict.source))
            yield from table(console, picture.matrix(verdict.follows), language, picture.rows)
    claimed, right = picture.matrix(verdict.claimed), picture.matrix(verdict.truth)
    if right.shape[0] > _ROWS or right.shape[1] > _COLS:
        row, column = (int(at) for at in np.unravel_index(gaps(claimed, right).argmax(), right.shape))
        worst = {"claimed": float(claimed[row, column]), "right": float(right[row, column])}
        yield Text("    " + say(language, "worst", row=row, column=column, **worst))
    for key, array in (("claimed", claimed), ("right", right)):
        yield Text("  " + say(language, key))
        yield from table(console, array, language, picture.rows)


def _one_query(case: CheckedExample, place: Chosen, language: Language) -> Iterator[Text]:
    """One query's scores as lengths and angles, and its weights: ‖q‖·‖k‖·cos θ for each key."""
    problem, traced = case.trace.problem, case.trace
    if isinstance(traced, WeightsTrace) or not problem.queries or not problem.keys:
        return
    n, m = problem.queries, problem.keys
    norms, key_norms, cosine = (np.asarray(x) for x in traced.geometry)
    at = place.batch, place.head, place.query
    norm = float(norms.reshape(-1, problem.heads, n)[at])
    lengths = key_norms.reshape(-1, problem.kv_heads, m)[place.batch, problem.kv_head_of(place.head)]
    rows = (turned(np.asarray(x), traced.convention) for x in (cosine, traced.scores, traced.masked, traced.weights))
    cosines, scores, masked, weights = (x.reshape(-1, problem.heads, n, m)[at] for x in rows)
    query = _name(case, "queries", place.query).strip()
    name = f"{place.query} {query}" if case.tokens else str(place.query)
    yield title(say(language, "geometry", query=printable(name)))
    yield Text("  " + say(language, "norm", norm=norm), style="dim")
    heads = (shown("‖k‖"), shown("cos θ"), "q·k", say(language, "weight"))
    yield Text("  " + fill(say(language, "key"), 12) + "".join(fill(head, 11, right=True) for head in heads))
    order = np.arange(m) if m <= _ROWS else np.argsort(-weights, kind="stable")[:_ROWS]
    for j in order:
        key = _name(case, "keys", j)
        lead = label(key if case.sources is None else f"{j} {spelled(key)}", 12)
        numbers = "".join(figure(x, 4, 11) for x in (lengths[j], cosines[j], scores[j]))
        last = (
            fill(say(language, "masked weight"), 11, right=True)
            if np.isneginf(masked[j])
            else figure(weights[j], 4, 11)
        )
        yield Text(f"  {lead}{numbers}{last}")
    if m > _ROWS:
        yield Text("  " + say(language, "more", count=m - _ROWS), style="dim")
    yield Text()


def _closing(case: CheckedExample, language: Language, place: Chosen) -> Iterator[Text]:
    problem, (engine, difference) = case.trace.problem, case.trace.check
    if problem.batch > 1:
        yield Text(say(language, "others batches", batch=place.batch, batches=problem.batch), style="dim")
    if problem.heads > 1:
        yield Text(say(language, "others heads", head=place.head, heads=problem.heads), style="dim")
    yield Text(say(language, "check", engine=engine, difference=difference), style="dim")
    yield from _judged(case.verdicts, case.first_wrong, language)


def _judged(verdicts: Sequence[Verdict], first: Verdict | None, language: Language) -> Iterator[Text]:
    if not verdicts:
        yield Text(say(language, "no claims"))
    elif first is None:
        names = _SEPARATOR[language].join(verdict.name for verdict in verdicts)
        yield Text(say(language, "all right", names=names), style="bold green")
    else:
        words = say(language, "first wrong", name=first.name, difference=first.difference)
        yield Text(_with_cause(words, first, language), style="bold red")
        for verdict in verdicts:
            if not verdict.right and verdict is not first:
                yield Text(_also(verdict, language), style="red")


def _also(verdict: Verdict, language: Language) -> str:
    if verdict.source is None:
        words = say(language, "wrong too", name=verdict.name, difference=verdict.difference)
        return _with_cause(words, verdict, language)
    key = "follows on" if is_consequence(verdict) else "also wrong"
    return say(language, key, name=verdict.name, source=verdict.source, difference=verdict.off_source)


def _with_cause(words: str, verdict: Verdict, language: Language) -> str:
    did = verdict.did(language)
    return f"{words}{say(language, 'because')}{say(language, 'and').join(did)}" if did else words
