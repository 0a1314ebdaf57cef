"""The lessons in the terminal: a layer's shapes, several numbers of heads, why √d_k, and how a small model learns."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.core.axes import Array
from clearhead.diagnosing.claims import CheckedExample
from clearhead.digits import fixed, percent, significant
from clearhead.explaining.learning import Learning
from clearhead.report.cells import between, colourful, columns, note, rgb, table, title
from clearhead.report.console import put
from clearhead.report.explained import share_line
from clearhead.report.streams import spelled
from clearhead.report.traced import grid
from clearhead.tables import bar
from clearhead.textbook.heads import WithHeads
from clearhead.textbook.heads_page import entropy_range
from clearhead.textbook.layer_shapes import LayerShapes
from clearhead.textbook.symbols import Size, total
from clearhead.textbook.why_scale import Saturation, WhyScale
from clearhead.words import Language, formula, say

_BESIDE = ("x", "context", "q", "k", "v", "scores", "weights", "heads", "concat", "output")
_WIDE = 11  # a column of the tables of scales
_LINES = 12  # of the table of training steps
_LEARNED = (-14, -9, 20, -10, -10, -10)  # its columns
_NEGATIVE, _ZERO, _POSITIVE = ((221, 140, 38), (32, 32, 38), (122, 178, 246))
_SIGNS = "=- +#"  # without colour


def show_shapes(console: Console, shapes: LayerShapes, language: Language) -> None:
    """Print a layer's steps in symbols and, where they are known, in numbers; then what they cost in all."""
    put(console, _shapes(shapes, language))


def _shapes(shapes: LayerShapes, language: Language) -> Iterator[Text]:
    steps, counted = shapes.symbols, shapes.numbers or shapes.symbols
    for step, number in zip(steps, counted, strict=True):
        sizes = [formula(language, step.formula), _shape(step.shape), _shape(number.shape) if shapes.numbers else ""]
        yield columns((28, 22, 0), sizes, "bold")
        yield note(f"  {say(language, step.words)}")
        if step.multiply_adds:
            yield Text("  " + say(language, "work", work=_both([step.multiply_adds], [number.multiply_adds])))
    yield Text()
    for name, pair in shapes.parameters.items():
        count = say(language, "parameters", count=_both(*zip(pair)))
        yield columns((6, 0), [f"W^{name[-1].upper()}", count])
    yield Text(say(language, "parameters in all", count=_both(*zip(*shapes.parameters.values(), strict=True))))
    work, stored = (
        _both(*([getattr(step, name) for step in each if name != "bytes" or step.name == "weights"] for each in both))
        for name, both in (("multiply_adds", (steps, counted)), ("bytes", (steps, counted)))
    )
    yield Text(say(language, "work in all", work=work))
    yield note(say(language, "bytes of weights", size=stored))


def _shape(shape: Sequence[Size]) -> str:
    return f"({', '.join(map(str, shape))})"


def _both(symbols: Iterable[Size], numbers: Iterable[Size]) -> str:
    """A sum in symbols, and what it comes to where more is known."""
    sums = dict.fromkeys((total(symbols), total(numbers)))
    return " = ".join(sums)


def show_heads(console: Console, case: CheckedExample, layers: Sequence[WithHeads], language: Language) -> None:
    """Print a layer with several numbers of heads in columns: shapes, parameters and cost; then each output."""
    put(console, _heads(layers, language))
    put(console, _outputs(console, case, layers, language))


def _heads(layers: Sequence[WithHeads], language: Language) -> Iterator[Text]:
    shapes: list[tuple[str, list[str]]] = []
    for steps in zip(*(layer.trace.steps for layer in layers), strict=True):
        if steps[0].name in _BESIDE:
            same = len({step.formula for step in steps}) == 1
            name = steps[0].formula.split(",")[0] if same else steps[0].symbol
            shapes.append((name, [_shape(step.shape) for step in steps]))
    numbers = {
        "parameters beside": [f"{layer.parameters:,}" for layer in layers],
        "work beside": [f"{layer.multiply_adds:,}" for layer in layers],
        "scores beside": [f"{np.size(layer.trace.weights):,}" for layer in layers],
        "entropy beside": [entropy_range(layer.entropy) for layer in layers],
        "difference beside": [significant(layer.difference) for layer in layers],
    }
    lines = [*shapes, ("", []), *((say(language, key), cells) for key, cells in numbers.items())]
    head = [f"h = {layer.num_heads}" for layer in layers]
    lead = max(cell_len(name) for name, _ in lines) + 2
    width = max(cell_len(cell) for _, cells in lines for cell in (*cells, *head)) + 2
    yield title(say(language, "beside"))
    rows = ((f"  {name}", *cells) for name, cells in lines)
    yield from table((lead + 2, *[-width] * len(layers)), ["", *head], rows, "bold")
    yield note(say(language, "beside says"))


def _outputs(console: Console, case: CheckedExample, layers: Sequence[WithHeads], language: Language) -> Iterator[Text]:
    names = case.tokens if case.trace.convention == "rows" else None
    for layer in layers:
        output = np.asarray(layer.trace.output)
        yield Text()
        yield title(say(language, "output beside", heads=layer.num_heads))
        if (batches := layer.trace.problem.batch) > 1:
            yield Text("  " + say(language, "batch of", batch=0, batches=batches), style="dim")
        for matrix in output.reshape(-1, *output.shape[-2:])[:1]:
            yield from grid(console, matrix, language, names)


def show_scale(
    console: Console, scale: WhyScale, drawn: dict[str, int], growing: Saturation, language: Language
) -> None:
    """Print a table by width, and one query's softmax as it saturates; `drawn` has the numbers of queries and keys."""
    put(console, _scale(scale, drawn, language))
    put(console, _growing(growing, language))


def _scale(scale: WhyScale, drawn: dict[str, int], language: Language) -> Iterator[Text]:
    yield title(say(language, "why scale"))
    yield note(say(language, "variance grows"))
    yield Text()
    above = [say(language, key) for key in ("variance of", "not divided", "divided")]
    yield columns((_WIDE, *[-2 * _WIDE] * 3), ["", *above])
    heads = ["d_k", "q·k", "/√d_k", "max a", "a(1-a)", "max a", "a(1-a)"]
    steps = zip(*scale[:7], strict=True)  # the others are pictures
    rows = ([str(d_k), *(fixed(float(x), 4, 10) for x in numbers)] for d_k, *numbers in steps)
    yield from table([-_WIDE] * 7, heads, rows, "bold")
    yield Text()
    yield note(say(language, "slope vanishes", **drawn))
    yield Text()


def _growing(growing: Saturation, language: Language) -> Iterator[Text]:
    yield title(say(language, "saturation"))
    heads = [say(language, "factor"), *(f"a_{j}" for j in range(growing.weights.shape[-1])), "a(1-a)"]
    rows = []
    for factor, weights, slopes in zip(*growing, strict=True):
        numbers = [fixed(float(x), 4, 10) for x in (*weights, slopes[0])]
        rows.append([f"{factor:g}", *numbers, f"  {bar(4 * float(slopes[0]), 16)}"])
    yield from table([*[-_WIDE] * len(heads), 0], heads, rows, "bold")


def show_learning(console: Console, run: Learning, step: int, language: Language) -> None:
    """Print the loss by step, then the matrices and the next token of the last recorded step up to `step`."""
    place = int(np.searchsorted(run.step, step, side="right")) - 1
    put(console, _curve(run, place, language))
    put(console, _matrices(console, run, place, language))
    put(console, _attended(run, place, language))
    put(console, [Text(), note(run.words("learn check", language)), note(say(language, "learn others"))])


def _curve(run: Learning, place: int, language: Language) -> Iterator[Text]:
    yield title(run.words("learn", language))
    yield note(run.words("learn says", language))
    yield Text()
    colon = say(language, "because")
    heads = [say(language, "learn step"), say(language, "learn loss"), "", "|∂/∂W_Q|", "|∂/∂W_K|", "|∂/∂W_V|"]
    yield columns(_LEARNED, heads, "bold")
    shown_steps = {*np.linspace(0, len(run.step) - 1, _LINES).round().astype(int).tolist(), place}
    for number in sorted(shown_steps):
        loss, mark = float(run.loss[number]), "→ " if number == place else ""
        cells = [f"{mark}{run.step[number]}", fixed(loss, 3, 8), f"  {bar(loss / float(run.loss.max()), 16)}"]
        slopes = [significant(float(x), 2) for x in run.gradient[number]]
        yield columns(_LEARNED, [*cells, *slopes], "bold" if mark else "")
    yield note(f"{say(language, 'learn loss')}{colon}{run.words('learn loss says', language)}")
    yield note(f"|∂/∂W|{colon}{run.words('learn gradient', language)}")


def _matrices(console: Console, run: Learning, place: int, language: Language) -> Iterator[Text]:
    yield Text()
    step = f"{say(language, 'learn step')} {run.step[place]}"
    yield title(f"{step}{say(language, 'because')}{run.words('learn matrices', language)}")
    three = [getattr(run, name)[place] / run.reach for name in ("w_q", "w_k", "w_v")]
    yield columns((2, *[three[0].shape[1] + 4] * 3), ("", "W_Q", "W_K", "W_V"))
    tall = 2 if colourful(console) else 1
    for row in range(0, len(three[0]), tall):
        line = Text("  ")
        for matrix in three:
            line.append_text(_row(console, matrix[row : row + tall])).append("    ")
        line.rstrip()
        yield line
    signs = "" if colourful(console) else say(language, "learn signs")
    yield note(run.words("learn range", language) + signs)


def _row(console: Console, rows: Array) -> Text:
    """Two rows as one line of half blocks, or one row as signs; by the square root, since most numbers are small."""
    if not colourful(console):
        return Text("".join(_SIGNS[place] for place in np.digitize(rows[0], (-0.5, -0.125, 0.125, 0.5))))
    line = Text()
    for pair in rows.T.tolist():
        ends = [(_NEGATIVE if x < 0 else _POSITIVE, min(1.0, abs(x)) ** 0.5) for x in pair]
        upper, lower = (rgb(between(_ZERO, end, part)) for end, part in ends)
        line.append("▀", Style(color=upper, bgcolor=lower))
    return line


def _attended(run: Learning, place: int, language: Language) -> Iterator[Text]:
    """Whom the last token attends to in each head, and what follows the text."""
    yield Text()
    yield title(run.words("learn attention", language))
    names = [spelled(token) for token in run.tokens]
    lead = max(cell_len(name) for name in names) + 2
    heads = [say(language, "learn column", head=head) for head in range(run.config.heads)]
    shares = [[f"{percent(x):>7} {bar(x, 14)}" for x in row] for row in run.weights[place, :, -1].T.tolist()]
    rows = ([f"  {name}", *row] for name, row in zip(names, shares, strict=True))
    yield from table((lead + 2, *[26] * len(heads)), ["", *heads], rows, "")
    yield Text()
    yield title(run.words("learn next", language))
    yield from (share_line(run.vocabulary[token], float(run.following[place, token])) for token in run.likeliest())
