"""How W_Q, W_K and W_V are learned, in the terminal: the loss by step, then one step's matrices and next token."""

from collections.abc import Iterator

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.core.axes import Array
from clearhead.digits import fixed, percent, significant
from clearhead.explaining.learning import Learning
from clearhead.report.console import put, title
from clearhead.report.explained import fill
from clearhead.report.heat import bar, colourful, label
from clearhead.report.streams import spelled
from clearhead.words import Language, say

_LINES = 12  # of the table of steps
_NEGATIVE, _ZERO, _POSITIVE = ((221, 140, 38), (32, 32, 38), (122, 178, 246))
_SIGNS = "=- +#"  # without colour


def show(console: Console, run: Learning, step: int, language: Language) -> None:
    """Print all of it; of the matrices those of the last recorded step up to `step`."""
    at = int(np.searchsorted(run.step, step, side="right")) - 1
    for part in (_curve(run, at, language), _matrices(console, run, at, language), _sees(run, at, language)):
        for line in part:
            put(console, line)
    put(console, Text())
    put(console, Text(run.words("learn check", language), style="dim"))
    put(console, Text(say(language, "learn others"), style="dim"))


def _curve(run: Learning, at: int, language: Language) -> Iterator[Text]:
    yield title(run.words("learn", language))
    yield Text(run.words("learn says", language), style="dim")
    yield Text()
    colon = say(language, "because")
    heads = [say(language, "learn step"), say(language, "learn loss"), "", "|∂/∂W_Q|", "|∂/∂W_K|", "|∂/∂W_V|"]
    wide = (14, 9, 20, 10, 10, 10)
    yield title(
        "".join(
            fill(head, width, right=place != 2) for place, (head, width) in enumerate(zip(heads, wide, strict=True))
        )
    )
    lines = {*np.linspace(0, len(run.step) - 1, _LINES).round().astype(int).tolist(), at}
    for place in sorted(lines):
        loss, slopes = float(run.loss[place]), run.gradient[place]
        drawn = fill(f"  {bar(loss / float(run.loss.max()), 16)}", 20)
        numbers = "".join(f"{significant(float(x), 2):>10}" for x in slopes)
        mark = "→ " if place == at else ""
        yield Text(
            f"{mark + str(run.step[place]):>14}{fixed(loss, 3, 8):>9}{drawn}{numbers}", style="bold" if mark else ""
        )
    yield Text(f"{say(language, 'learn loss')}{colon}{run.words('learn loss says', language)}", style="dim")
    yield Text(f"|∂/∂W|{colon}{run.words('learn gradient', language)}", style="dim")


def _matrices(console: Console, run: Learning, at: int, language: Language) -> Iterator[Text]:
    yield Text()
    yield title(
        f"{say(language, 'learn step')} {run.step[at]}{say(language, 'because')}{run.words('learn matrices', language)}"
    )
    three = [getattr(run, name)[at] / run.reach for name in ("w_q", "w_k", "w_v")]
    wide = three[0].shape[1]
    yield Text("  " + "".join(fill(name, wide + 4) for name in ("W_Q", "W_K", "W_V")).rstrip())
    tall = 2 if colourful(console) else 1
    for row in range(0, len(three[0]), tall):
        line = Text("  ")
        for matrix in three:
            line.append_text(_row(console, matrix[row : row + tall]))
            line.append("    ")
        line.rstrip()
        yield line
    legend = run.words("learn range", language)
    yield Text(
        legend if colourful(console) else legend + say(language, "learn signs"),
        style="dim",
    )


def _row(console: Console, rows: Array) -> Text:
    """Two rows as one line of half blocks, or one row as signs."""
    if not colourful(console):
        places = np.digitize(rows[0], (-0.5, -0.125, 0.125, 0.5))
        return Text("".join(_SIGNS[place] for place in places))
    line = Text()
    for upper, lower in rows.T:
        line.append("▀", Style(color=_colour(float(upper)), bgcolor=_colour(float(lower))))
    return line


def _colour(x: float) -> Color:
    """A number from −1 to 1; by the square root, since most are small."""
    end, part = (_NEGATIVE if x < 0 else _POSITIVE), min(1.0, abs(x)) ** 0.5
    return Color.from_rgb(*(round(low + (high - low) * part) for low, high in zip(_ZERO, end, strict=True)))


def _sees(run: Learning, at: int, language: Language) -> Iterator[Text]:
    yield Text()
    yield title(run.words("learn attention", language))
    names = [spelled(token) for token in run.tokens]
    lead = max(cell_len(name) for name in names) + 2
    heads = [say(language, "learn column", head=head) for head in range(run.config.heads)]
    yield Text("  " + " " * lead + "".join(fill(head, 26) for head in heads).rstrip())
    for key, name in enumerate(names):
        shares = run.weights[at, :, -1, key]
        cells = "".join(set_cell_size(f"{percent(float(x)):>7} {bar(float(x), 14)}", 26) for x in shares)
        yield Text(f"  {set_cell_size(name, lead)}{cells}".rstrip())
    yield Text()
    yield title(run.words("learn next", language))
    for token in run.likeliest():
        share = float(run.following[at, token])
        yield Text(f"  {label(spelled(run.vocabulary[token]), 12)} {percent(share):>7}  {bar(share, 24)}".rstrip())
