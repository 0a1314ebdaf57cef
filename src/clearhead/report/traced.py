"""A trace in the terminal: every step with formula, shape and numbers, and a verdict on every claim; a diagnosis."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

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
from clearhead.report.heat import matrices
from clearhead.report.streams import bare, spelled
from clearhead.textbook.computed import differences
from clearhead.textbook.shapes import Step, turned
from clearhead.words import Language, formula, say

_ROWS, _COLS = 8, 8
_BOUNDS = 4  # of a query's output
_NOUNS = {"batch": ("batch", "batch entries"), "head": ("head", "heads"), "query": ("query", "queries")}
_STYLES = {"did": "bold", "mend": "green", "note": "dim"}
_VERDICTS = {"right": "bold green", "mistake": "bold red", "ambiguous": "bold red", "unexplained": "bold yellow"}


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
    asked = {"batch": (batch, problem.batch), "head": (head, problem.heads), "query": (query, problem.queries)}
    for name, (value, size) in asked.items():
        if value is not None and not 0 <= value < size:
            what = f"{_NOUNS[name][0]} {value} is outside 0..{size - 1}"
            raise SelectionError(f"{what}: the file has {size} {_NOUNS[name][size != 1]}.")
    return _worst(case)._replace(**{name: value for name, (value, _) in asked.items() if value is not None})


def show(console: Console, case: CheckedExample, language: Language, place: Chosen) -> None:
    """Print every step, then what is wrong with the claims, so that this stays on the screen."""
    verdicts = {verdict.name: verdict for verdict in case.verdicts}
    for step in case.trace.steps:
        put(console, _step(console, _Picture(case, step, place), verdicts.get(step.name), language))
        console.print()
    put(console, _one_query(case, place, language))
    put(console, _mixture(case, place, language))
    put(console, _closing(case, language, place))


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
        axes = list(zip(step.axes, step.shape, strict=True))[:-2]
        heads = [(name, places[name], size) for name, size in axes if name in places]
        batches = prod(size for name, size in axes if name not in places)
        return [("batch", self.place.batch, batches), *heads] if len(step.shape) > 2 + len(heads) else heads

    def matrix(self, array: Array) -> Array:
        """The printed matrix of an array with this step's axes."""
        flat = np.asarray(array, dtype=np.float64).reshape(*(size for *_, size in self.lead), *self.step.shape[-2:])
        return np.asarray(flat[tuple(index for _, index, _ in self.lead)])

    @property
    def masked(self) -> Array:
        """Which cells of the printed weights are forbidden."""
        return np.isneginf(self.matrix(self.case.trace.masked))

    @property
    def rows(self) -> Sequence[str] | None:
        """The tokens that the rows of this step belong to, if the file names them and tokens are its rows."""
        return {"queries": self.case.tokens, "keys": self.case.sources}.get(self.step.axes[-2])

    def where(self, language: Language) -> str:
        """Which batch entry and head that is; empty where there is only one."""
        words = []
        for name, index, size in self.lead:
            if size > 1 and name == "batch":
                words.append(say(language, "batch of", batch=index, batches=size))
            elif size > 1:
                words.append(say(language, "head of" if name == "heads" else "key head of", head=index, heads=size))
        return say(language, "separator").join(words)


def _worst(case: CheckedExample) -> Chosen:
    """Where the first wrong claim is furthest off."""
    wrong, problem = case.first_wrong, case.trace.problem
    if wrong is None or not wrong.truth.size:
        return Chosen(0, 0, 0)
    off = differences(wrong.claimed, wrong.truth)
    index = [int(place) for place in np.unravel_index(off.argmax(), off.shape)]
    axes_of = {step.name: step.axes for step in case.trace.steps}
    axes = axes_of.get(wrong.name, axes_of["weights"])  # a step that is not used, such as capped, has those of weights
    lead = [place for place, name in enumerate(axes) if name == "batch"]
    batch = np.ravel_multi_index([index[axis] for axis in lead], [off.shape[axis] for axis in lead]) if lead else 0
    place = dict(zip(axes, index, strict=True))
    head = place.get("heads", place.get("kv_heads", 0) * problem.group)
    return Chosen(int(batch), head, place.get("queries", 0))


def _step(console: Console, picture: _Picture, verdict: Verdict | None, language: Language) -> Iterator[Text]:
    case, step = picture.case, picture.step
    yield title(f"{formula(language, step.formula)}   {named(step.shape, step.axes)}")
    yield note(f"  {say(language, step.words)}")
    if where := picture.where(language):
        yield note(f"  {where}")
    if 0 in step.shape:
        return
    array = picture.matrix(step.array)
    if step.name == "weights":
        axes = zip(step.axes[-2:], array.shape, strict=True)
        rows, cols = ([_name(case, axis, i) for i in range(size)] for axis, size in axes)
        yield from matrices(console, [(array, picture.masked)], rows, cols, language)
        in_rows = case.trace.convention == "rows"
        axis = -1 if in_rows else -2  # a query's weights
        sums = array.sum(axis=axis)[~picture.masked.all(axis=axis)]
        said = sum_words(language, sums, rows=in_rows, sinks=case.trace.problem.sinks is not None)
        yield note("  " + say(language, "axes" if in_rows else "axes columns") + say(language, "also") + said)
    else:
        yield from grid(console, array, language, picture.rows)
    if verdict is not None:
        yield from _verdict(console, picture, verdict, language)


def _name(case: CheckedExample, axis: str, place: int) -> str:
    """A query's or key's token, or q_0, k_0 where the file names none."""
    names = case.tokens if axis == "queries" else case.sources
    return f"{'q' if axis == 'queries' else 'k'}_{place}" if names is None else names[place]


def grid(console: Console, array: Array, language: Language, names: Sequence[str] | None = None) -> Iterator[Text]:
    """The numbers of a matrix, its first rows and columns where it is large; with the names of its rows, if any."""
    lead = 0 if names is None else min(10, max(cell_len(bare(name)) for name in names[:_ROWS])) + 1
    part = array[:_ROWS, : min(_COLS, max(1, (console.width - 1 - lead) // 9))]
    decimals = 4 if np.abs(part[np.isfinite(part)]).max(initial=0) < 100 else 2
    for place, row in enumerate(part):
        name = "" if names is None else label(bare(names[place]), lead - 1)
        yield columns((2 + lead, -8, *[-9] * len(row)), [f"  {name}", *(fixed(float(x), decimals, 8) for x in row)])
    if part.shape != array.shape:
        size = dict(zip(("rows", "cols", "all_rows", "all_cols"), (*part.shape, *array.shape), strict=True))
        yield note("  " + say(language, "cut", **size))


def _verdict(console: Console, picture: _Picture, verdict: Verdict, language: Language) -> Iterator[Text]:
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
            yield from grid(console, picture.matrix(verdict.follows), language, picture.rows)
    claimed, right = picture.matrix(verdict.claimed), picture.matrix(verdict.truth)
    if right.shape[0] > _ROWS or right.shape[1] > _COLS:
        row, column = (int(place) for place in np.unravel_index(differences(claimed, right).argmax(), right.shape))
        worst = {"claimed": float(claimed[row, column]), "right": float(right[row, column])}
        yield Text("    " + say(language, "worst", row=row, column=column, **worst))
    for key, array in (("claimed", claimed), ("right", right)):
        yield Text("  " + say(language, key))
        yield from grid(console, array, language, picture.rows)


def _one_query(case: CheckedExample, place: Chosen, language: Language) -> Iterator[Text]:
    """One query's scores as lengths and angles, and its weights: ‖q‖·‖k‖·cos θ for each key."""
    problem = case.trace.problem
    if not problem.queries or not problem.keys:
        return
    m, token = problem.keys, case.trace.token(place.query)
    rows = token.norm[..., None], token.key_norms, token.cosine, token.scores, token.weights, token.masked
    norm, *numbers, masked = (np.asarray(x).reshape(problem.batch, problem.heads, -1)[place[:2]] for x in rows)
    query = bare(_name(case, "queries", place.query))
    yield title(say(language, "geometry", query=f"{place.query} {query}" if case.tokens else str(place.query)))
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


def _mixture(case: CheckedExample, place: Chosen, language: Language) -> Iterator[Text]:
    """One query's output as a sum of values, and between which numbers it lies, where the weights sum to 1."""
    traced, problem = case.trace, case.trace.problem
    if not problem.queries or not problem.keys:
        return
    token = traced.token(place.query)
    weights, output = (np.asarray(x).reshape(problem.batch, problem.heads, -1) for x in (token.weights, token.output))
    weights, output = weights[place[:2]], output[place[:2]]
    names = None if case.sources is None else [bare(name) for name in case.sources]
    yield title(say(language, "mixture", query=place.query))
    yield Text(f"  {token.written_out(place.batch * problem.heads + place.head, tokens=names)}")
    if abs(weights.sum() - 1) < 1e-6 and np.isfinite(output).all():
        v = turned(np.asarray(traced.v), traced.convention)
        v = v.reshape(problem.batch, problem.kv_heads, problem.keys, -1)[place.batch, problem.kv_head_of(place.head)]
        ends = v[weights > 0].min(axis=0), output, v[weights > 0].max(axis=0)
        bounds = ["≤".join(fixed(float(x), 4, 8) for x in three) for three in list(zip(*ends, strict=True))[:_BOUNDS]]
        yield note("  " + say(language, "convex combination", bounds=say(language, "separator").join(bounds)))
    d_v = token.output.shape[-1]
    if problem.d_k != d_v:
        yield note("  " + say(language, "widths differ", d_k=problem.d_k, d_v=d_v))
    yield Text()


def _closing(case: CheckedExample, language: Language, place: Chosen) -> Iterator[Text]:
    problem, trace = case.trace.problem, case.trace
    if problem.batch > 1:
        yield note(say(language, "others batches", batch=place.batch, batches=problem.batch))
    if problem.heads > 1:
        yield note(say(language, "others heads", head=place.head, heads=problem.heads))
    yield note(say(language, "check", engine=trace.engine, difference=trace.difference))
    yield from _judged(case.verdicts, case.first_wrong, language)


def _judged(verdicts: Sequence[Verdict], first: Verdict | None, language: Language) -> Iterator[Text]:
    """Which claims of a file are wrong, `first` the first of them, or that all are right."""
    if not verdicts:
        yield Text(say(language, "no claims"))
    elif first is None:
        names = say(language, "separator").join(verdict.name for verdict in verdicts)
        yield Text(say(language, "all right", names=names), style="bold green")
    else:
        words = say(language, "first wrong", name=first.name, difference=first.difference)
        yield Text(_with_cause(words, first, language), style="bold red")
        for verdict in verdicts:
            if not verdict.right and verdict is not first:
                yield Text(_also_wrong(verdict, language), style="red")


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
