"""A trace in the terminal: every step with formula, shape and numbers, and a verdict on every claim."""

from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.text import Text

from clearhead.axes import Array, named
from clearhead.claims import Case, Verdict, follows
from clearhead.report.explained import matrix_lines, title
from clearhead.steps import Step
from clearhead.words import Language, formula, say

_ROWS, _COLS = 8, 8


def show(console: Console, case: Case, language: Language) -> None:
    """Print every step, then what is wrong with the claims, first things last so that they stay on the screen."""
    verdicts = {verdict.name: verdict for verdict in case.verdicts}
    for step in case.trace.steps:
        for line in _step(console, case, step, verdicts.get(step.name), language):
            console.print(line, soft_wrap=True, highlight=False)
        console.print()
    for line in _closing(case, language):
        console.print(line, soft_wrap=True, highlight=False)


def _step(console: Console, case: Case, step: Step, verdict: Verdict | None, language: Language) -> Iterator[Text]:
    yield title(f"{formula(language, step.formula)}   {named(step.shape, step.axes)}")
    yield Text(f"  {say(language, step.words)}", style="dim")
    array = np.asarray(step.array, dtype=np.float64)
    if step.name == "weights" and array.ndim == 2 and array.size:
        rows, cols = (
            [f"{axis[0]}_{i}" for i in range(size)] for axis, size in zip(_letters(step), array.shape, strict=True)
        )
        masked = np.isneginf(np.asarray(case.trace.masked))
        yield from matrix_lines(console, array, masked, rows, cols, language)
    else:
        yield from _table(array, language)
    if verdict is not None:
        yield from _verdict(verdict, language)


def _letters(step: Step) -> list[str]:
    return ["q" if axis == "queries" else "k" for axis in step.axes[-2:]]


def _table(array: Array, language: Language) -> Iterator[Text]:
    """The numbers of a matrix, its first rows and columns where it is large; the first head where it has several."""
    lead = array.shape[:-2]
    if 0 in array.shape:
        return
    if lead:
        heads = int(np.prod(lead))
        array = array.reshape(heads, *array.shape[-2:])[0]
        if heads > 1:
            yield Text("  " + say(language, "head of", head=0, heads=heads), style="dim")
    shown = array[:_ROWS, :_COLS]
    decimals = 4 if np.abs(shown[np.isfinite(shown)]).max(initial=0) < 100 else 2
    for row in shown:
        yield Text("  " + " ".join(f"{'-∞' if value == -np.inf else f'{value:.{decimals}f}':>8}" for value in row))
    if shown.shape != array.shape:
        size = dict(zip(("rows", "cols", "all_rows", "all_cols"), (*shown.shape, *array.shape), strict=True))
        yield Text("  " + say(language, "cut", **size), style="dim")


def _verdict(verdict: Verdict, language: Language) -> Iterator[Text]:
    if verdict.right:
        yield Text("  " + say(language, "claim right", name=verdict.name), style="green")
        return
    yield Text("  " + say(language, "claim wrong", name=verdict.name, difference=verdict.difference), style="bold red")
    for did in verdict.did(language):
        yield Text("    " + did, style="bold")
    if verdict.source and verdict.follows is not None:
        key = "follows" if follows(verdict) else "also off"
        yield Text("  " + say(language, key, source=verdict.source, difference=verdict.off_source))
        if key == "also off":
            yield from _labelled(say(language, "from own", source=verdict.source), verdict.follows, language)
    yield from _labelled(say(language, "claimed"), verdict.claimed, language)
    yield from _labelled(say(language, "right"), verdict.truth, language)


def _labelled(name: str, array: Array, language: Language) -> Iterator[Text]:
    yield Text(f"  {name}:")
    yield from _table(np.asarray(array, dtype=np.float64), language)


def _closing(case: Case, language: Language) -> Iterator[Text]:
    engine, difference = case.trace.check
    yield Text(say(language, "check", engine=engine, difference=difference), style="dim")
    if case.trace.read_as(language):
        yield Text(case.trace.read_as(language), style="dim")
    first = case.first_wrong
    if not case.verdicts:
        yield Text(say(language, "no claims"))
    elif first is None:
        yield Text(say(language, "all right", names=", ".join(v.name for v in case.verdicts)), style="bold green")
    else:
        words = say(language, "first wrong", name=first.name, difference=first.difference)
        yield Text(_with_cause(words, first, language), style="bold red")
        for verdict in case.verdicts:
            if not verdict.right and verdict is not first:
                yield Text(_also(verdict, language), style="red")


def _also(verdict: Verdict, language: Language) -> str:
    if verdict.source is None:
        words = say(language, "wrong too", name=verdict.name, difference=verdict.difference)
        return _with_cause(words, verdict, language)
    key = "follows on" if follows(verdict) else "also wrong"
    return say(language, key, name=verdict.name, source=verdict.source, difference=verdict.off_source)


def _with_cause(words: str, verdict: Verdict, language: Language) -> str:
    did = verdict.did(language)
    return f"{words}: {say(language, 'both').join(did)}" if did else words
