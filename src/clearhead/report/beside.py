"""One head against several in the terminal: shapes, parameters, cost and outputs in columns."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from clearhead.diagnosing.claims import CheckedExample
from clearhead.digits import significant
from clearhead.report.console import put, title
from clearhead.report.explained import fill
from clearhead.report.traced import table
from clearhead.textbook.heads import WithHeads
from clearhead.words import Language, say

_SHAPES = ("x", "context", "q", "k", "v", "scores", "weights", "heads", "concat", "output")


def show(console: Console, case: CheckedExample, every: Sequence[WithHeads], language: Language) -> None:
    """Print the comparison, then each output."""
    for line in (*_columns(every, language), *_outputs(console, case, every, language)):
        put(console, line)


def _columns(every: Sequence[WithHeads], language: Language) -> Iterator[Text]:
    rows: list[tuple[str, list[str]]] = []
    for steps in zip(*(each.trace.steps for each in every), strict=True):
        if steps[0].name in _SHAPES:
            same = len({step.formula for step in steps}) == 1
            rows.append((steps[0].formula.split(",")[0] if same else steps[0].symbol, [_shape(s.shape) for s in steps]))
    numbers = {
        "parameters beside": [f"{each.parameters:,}" for each in every],
        "work beside": [f"{each.multiply_adds:,}" for each in every],
        "scores beside": [f"{_cells(each):,}" for each in every],
        "entropy beside": [_reach(each) for each in every],
        "difference beside": [significant(each.difference) for each in every],
    }
    told = [(say(language, key), cells) for key, cells in numbers.items()]
    head = [f"h = {each.num_heads}" for each in every]
    lead = max(cell_len(name) for name, _ in (*rows, *told)) + 2
    width = max(cell_len(cell) for _, cells in (*rows, *told) for cell in (*cells, *head)) + 2

    def line(name: str, cells: Sequence[str]) -> str:
        return f"  {fill(name, lead)}" + "".join(fill(cell, width, right=True) for cell in cells)

    yield title(say(language, "beside"))
    yield title(line("", head))
    yield from (Text(line(name, cells)) for name, cells in rows)
    yield Text()
    yield from (Text(line(name, cells)) for name, cells in told)
    yield Text(say(language, "beside says"), style="dim")


def _outputs(console: Console, case: CheckedExample, every: Sequence[WithHeads], language: Language) -> Iterator[Text]:
    names = case.tokens if case.trace.convention == "rows" else None
    for each in every:
        output = np.asarray(each.trace.output)
        first = output.reshape(-1, *output.shape[-2:])[:1]
        yield Text()
        yield title(say(language, "output beside", heads=each.num_heads))
        if (batches := each.trace.problem.batch) > 1:
            yield Text("  " + say(language, "batch of", batch=0, batches=batches), style="dim")
        for matrix in first:
            yield from table(console, matrix, language, names)


def _shape(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _cells(each: WithHeads) -> int:
    return int(np.asarray(each.trace.weights).size)


def _reach(each: WithHeads) -> str:
    """The entropies of the heads: one, or the lowest and the highest."""
    entropies = each.entropy.reshape(-1)
    if not entropies.size:
        return "0"
    low, high = (significant(float(x)) for x in (entropies.min(), entropies.max()))
    return low if low == high else f"{low} … {high}"
