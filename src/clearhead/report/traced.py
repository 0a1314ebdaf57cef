"""A trace in the terminal: every step with formula, shape and numbers, and a verdict on every claim."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from clearhead.core.axes import Array, named
from clearhead.diagnosing.claims import CheckedExample, Verdict, gaps, is_consequence
from clearhead.digits import fixed
from clearhead.errors import SelectionError
from clearhead.report.console import put, title
from clearhead.report.explained import matrix_lines
from clearhead.report.streams import shown
from clearhead.textbook.shapes import Step
from clearhead.words import Language, formula, say

_ROWS, _COLS = 8, 8
_SEPARATOR = {"en": ", ", "zh": "，"}


class HeadIndex(NamedTuple):
    """The batch entry and the head that are printed; the leading axes count as one batch."""

    batch: int
    head: int


def chosen(case: CheckedExample, batch: int | None, head: int | None) -> HeadIndex:
    """The batch entry and head that were asked for, else those where the first wrong claim is furthest off, else 0.

    Raises SelectionError where there is no such batch entry or head.
    """
    problem = case.trace.problem
    for name, value, size in (("batch", batch, problem.batch), ("head", head, problem.heads)):
        if value is not None and not 0 <= value < size:
            count = f"{size} {name}{'' if size == 1 else 's' if name == 'head' else ' entries'}"
            raise SelectionError(f"{name} {value} is outside 0..{size - 1}: the file has {count}.")
    worst = _worst(case)
    return HeadIndex(worst.batch if batch is None else batch, worst.head if head is None else head)


def show(console: Console, case: CheckedExample, language: Language, place: HeadIndex) -> None:
    """Print every step, then what is wrong with the claims, so that this stays on the screen."""
    verdicts = {verdict.name: verdict for verdict in case.verdicts}
    for line in _opening(case, language):
        put(console, line)
    for step in case.trace.steps:
        for line in _step(console, _Picture(case, step, place), verdicts.get(step.name), language):
            put(console, line)
        console.print()
    for line in _closing(case, language, place):
        put(console, line)


class _Picture(NamedTuple):
    """One step, and the part of its arrays that is printed."""

    case: CheckedExample
    step: Step
    place: HeadIndex

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

    def where(self, language: Language) -> str:
        """Which batch entry and head that is; empty where there is only one."""
        keys = {"batch": "batch of", "heads": "head of", "kv_heads": "key head of"}
        said = []
        for name, at, size in self.lead:
            words = {"batch": at, "batches": size} if name == "batch" else {"head": at, "heads": size}
            said += [say(language, keys[name], **words)] if size > 1 else []
        return _SEPARATOR[language].join(said)


def _worst(case: CheckedExample) -> HeadIndex:
    """Where the first wrong claim is furthest off."""
    wrong = case.first_wrong
    problem = case.trace.problem
    if wrong is None or not wrong.truth.size:
        return HeadIndex(0, 0)
    per_head = not hasattr(case.trace, "concat") or wrong.name != "output"
    heads = problem.heads if per_head else 1
    at = int(gaps(wrong.claimed, wrong.truth).reshape(problem.batch * heads, -1).max(axis=1).argmax())
    return HeadIndex(at // heads, at % heads)


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
        letters = ["q" if axis == "queries" else "k" for axis in step.axes[-2:]]
        rows, cols = ([f"{letter}_{i}" for i in range(size)] for letter, size in zip(letters, array.shape, strict=True))
        masked = np.isneginf(picture.matrix(case.trace.masked))
        yield from matrix_lines(console, array, masked, rows, cols, language)
    else:
        yield from _table(array, language)
    if verdict is not None:
        yield from _verdict(picture, verdict, language)


def _table(array: Array, language: Language) -> Iterator[Text]:
    """The numbers of a matrix, its first rows and columns where it is large."""
    part = array[:_ROWS, :_COLS]
    decimals = 4 if np.abs(part[np.isfinite(part)]).max(initial=0) < 100 else 2
    for row in part:
        yield Text("  " + " ".join(f"{shown(fixed(float(value), decimals, 8)):>8}" for value in row))
    if part.shape != array.shape:
        size = dict(zip(("rows", "cols", "all_rows", "all_cols"), (*part.shape, *array.shape), strict=True))
        yield Text("  " + say(language, "cut", **size), style="dim")


def _verdict(picture: _Picture, verdict: Verdict, language: Language) -> Iterator[Text]:
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
            yield from _table(picture.matrix(verdict.follows), language)
    claimed, right = picture.matrix(verdict.claimed), picture.matrix(verdict.truth)
    if right.shape[0] > _ROWS or right.shape[1] > _COLS:
        row, column = (int(at) for at in np.unravel_index(gaps(claimed, right).argmax(), right.shape))
        worst = {"claimed": float(claimed[row, column]), "right": float(right[row, column])}
        yield Text("    " + say(language, "worst", row=row, column=column, **worst))
    for key, array in (("claimed", claimed), ("right", right)):
        yield Text("  " + say(language, key))
        yield from _table(array, language)


def _closing(case: CheckedExample, language: Language, place: HeadIndex) -> Iterator[Text]:
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
