"""A layer's shapes in the terminal: every step in symbols and, where they are known, in numbers, with its cost."""

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.text import Text

from clearhead.report.console import put, title
from clearhead.report.explained import fill
from clearhead.textbook.layer_shapes import LayerShapes
from clearhead.textbook.shapes import Step
from clearhead.textbook.symbols import Size, total
from clearhead.words import Language, formula, say


def show(console: Console, found: LayerShapes, language: Language) -> None:
    """Print the steps, then what they cost in all."""
    for line in (*_steps(found, language), Text(), *_costs(found, language)):
        put(console, line)


def _steps(found: LayerShapes, language: Language) -> Iterator[Text]:
    for step, counted in zip(found.symbols, found.numbers or found.symbols, strict=True):
        numbers = _shape(counted) if found.numbers else ""
        yield title(f"{fill(formula(language, step.formula), 28)}{fill(_shape(step), 22)}{numbers}".rstrip())
        yield Text(f"  {say(language, step.words)}", style="dim")
        if step.multiply_adds:
            yield Text("  " + say(language, "work", work=_both([step.multiply_adds], [counted.multiply_adds])))


def _costs(found: LayerShapes, language: Language) -> Iterator[Text]:
    for name, sizes in found.parameters.items():
        yield Text(f"{fill(f'W^{name[-1].upper()}', 6)}{say(language, 'parameters', count=_both(*zip(sizes)))}")
    symbols, numbers = zip(*found.parameters.values(), strict=True)
    yield Text(say(language, "parameters in all", count=_both(symbols, numbers)))
    steps, counted = found.symbols, found.numbers or found.symbols
    work = _both((step.multiply_adds for step in steps), (step.multiply_adds for step in counted))
    yield Text(say(language, "work in all", work=work))
    stored = [[step.bytes for step in each if step.name == "weights"] for each in (steps, counted)]
    yield Text(say(language, "bytes of weights", size=_both(*stored)), style="dim")


def _shape(step: Step) -> str:
    return f"({', '.join(map(str, step.shape))})"


def _both(symbols: Iterable[Size], numbers: Iterable[Size]) -> str:
    """A sum in symbols, and what it comes to where more is known."""
    told, counted = total(symbols), total(numbers)
    return told if told == counted else f"{told} = {counted}"
