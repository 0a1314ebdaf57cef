"""An explanation in the terminal: tokens, what comes next, the layer's steps, one head's weights, one token's sum."""

from collections.abc import Iterator

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from clearhead.axes import Array, named
from clearhead.explain import Explanation
from clearhead.model import SHIPPED
from clearhead.report.heat import MOST_NUMBERS, RAMP, bar, colourful, label, numbers, pixels, printable
from clearhead.words import Language, formula, say

_SHOWN_VALUES = 4
_SHOWN_KEYS = 8


def show(console: Console, seen: Explanation, language: Language) -> None:
    """Print all of it."""
    for part in (_opening, _layer, _weights, _arithmetic):
        for line in part(console, seen, language):
            console.print(line, soft_wrap=True, highlight=False)
        if part is not _arithmetic:
            console.print()


def title(text: str) -> Text:
    """A heading; bold where the terminal can."""
    return Text(text, style="bold")


def wrapped(console: Console, lead: str, words: list[str]) -> Iterator[Text]:
    """Words in as many lines as they need, the following ones indented under the first."""
    line, indent = lead, " " * cell_len(lead)
    for word in words:
        if cell_len(line) + cell_len(word) > console.width and line.strip():
            yield Text(line.rstrip())
            line = indent
        line += word
    yield Text(line.rstrip())


def matrix_lines(
    console: Console, weights: Array, masked: Array, rows: list[str], cols: list[str], language: Language
) -> Iterator[Text]:
    """A weight matrix with tokens on both axes and its legend."""
    if len(cols) <= MOST_NUMBERS and len(rows) <= 2 * MOST_NUMBERS:
        yield from numbers(console, weights, masked, rows, cols)
        pooled, ramp, drawn = weights, "", False
    else:
        lines, pooled = pixels(console, weights, masked, rows, cols)
        yield from lines
        drawn = colourful(console)
        ramp = "" if drawn else RAMP
    visible = weights[~masked]
    low, high = (float(visible.min()), float(visible.max())) if visible.size else (0.0, 0.0)
    kind = "legend ramp" if ramp else "legend" if colourful(console) else "legend plain"
    legend = [say(language, kind, low=low, high=high, ramp=ramp)]
    if masked.any():
        legend.append(say(language, "masked pixel" if drawn else "masked cell"))
    yield Text("  ".join(legend), style="dim")
    if pooled.shape != weights.shape:
        ratio = {"rows": weights.shape[0] / pooled.shape[0], "cols": weights.shape[1] / pooled.shape[1]}
        yield Text(say(language, "pooled", **ratio), style="dim")


def _opening(console: Console, seen: Explanation, language: Language) -> Iterator[Text]:
    if seen.window is not None:
        last = seen.window.stop - 1
        yield title(say(language, "window", **seen.window._asdict(), last=last))
    config = seen.model.config
    about = say(
        language, "model", name=seen.model.name, layers=config.layers, heads=config.heads, d_model=config.d_model
    )
    yield title(about)
    if seen.model.name == SHIPPED:
        yield Text(say(language, "illustration"), style="dim")
    yield Text()
    lead = say(language, "tokens") + "  "
    yield from wrapped(console, lead, [f"{i} {_spelled(t.text)}   " for i, t in enumerate(seen.tokens)])
    lead = say(language, "next") + "  "
    for place, choice in enumerate(seen.next):
        text = Text(lead if place == 0 else " " * cell_len(lead))
        text.append(f"{label(_spelled(choice.text), 12)} {_percent(choice.probability)}  {bar(choice.probability, 24)}")
        yield text


def _layer(_: Console, seen: Explanation, language: Language) -> Iterator[Text]:
    yield title(say(language, "layer", layer=seen.layer, heads=seen.model.config.heads))
    for step in seen.steps:
        shape = named(step.shape, step.axes)
        yield Text(f"  {_fill(formula(language, step.formula), 38)}{shape}")
        yield Text(f"      {say(language, step.words)}", style="dim")


def _weights(console: Console, seen: Explanation, language: Language) -> Iterator[Text]:
    yield title(
        say(language, "head", head=seen.head, layer=seen.layer)
        + f"  {named(seen.trace.weights.shape, ('queries', 'keys'))}"
    )
    facts = {
        "token": seen.token,
        "entropy": float(seen.entropy[seen.layer, seen.head]),
        "most": float(np.log(seen.token + 1)),
    }
    yield Text(say(language, "sharpest" if seen.chosen[1] else "entropy", **facts), style="dim")
    names = [token.text for token in seen.tokens]
    masked = np.isneginf(seen.trace.masked)
    yield from matrix_lines(console, seen.trace.weights, masked, names, names, language)
    deviation = float(np.abs(seen.trace.weights.sum(axis=-1) - 1).max())
    yield Text(f"{say(language, 'axes')}; {say(language, 'rows sum', deviation=deviation)}", style="dim")


def _arithmetic(_: Console, seen: Explanation, language: Language) -> Iterator[Text]:
    row, tokens = seen.row, seen.tokens
    name = f"{seen.token} {_spelled(tokens[seen.token].text)}"
    yield title(say(language, "how", token=name))
    width = row.contributions.shape[-1]
    count = min(_SHOWN_VALUES, width)
    d_k = seen.trace.q.shape[-1]
    scale = f"q·k/√{d_k}" if abs(seen.trace.problem.scale * d_k**0.5 - 1) < 1e-12 else "scale·q·k"
    head = say(language, "contribution", count=count, width=width)
    names = _fill(say(language, "key"), 12), _fill(say(language, "weight"), 10, right=True)
    yield Text(f"  {names[0]}{'q·k':>9}{scale:>10}{names[1]}  {head}")
    visible = np.flatnonzero(~np.isneginf(row.masked))
    order = visible[np.argsort(-row.weights[visible], kind="stable")]
    for j in order[:_SHOWN_KEYS]:
        lead = label(f"{j} {_spelled(tokens[j].text)}", 12)
        figures = f"{row.scores[j]:9.3f}{row.masked[j]:10.4f}{row.weights[j]:10.4f}"
        yield Text(f"  {lead}{figures}  {_values(row.contributions[j], count)}")
    rest = order[_SHOWN_KEYS:]
    if len(rest):
        more = _fill("  " + say(language, "more", count=len(rest)), 33)
        yield Text(f"{more}{row.weights[rest].sum():10.4f}  {_values(row.contributions[rest].sum(axis=0), count)}")
    total = _fill("  Σ = o", 33)
    yield Text(f"{total}{row.weights.sum():10.4f}  {_values(row.output, count)}", style="bold")
    yield Text(say(language, "agree", difference=row.difference), style="dim")
    engine, difference = seen.trace.check
    yield Text(say(language, "check", engine=engine, difference=difference), style="dim")


def _percent(share: float) -> str:
    return f"{share:7.2%}" if share >= 5e-5 else "<0.01%".rjust(7)


def _values(row: Array, count: int) -> str:
    return " ".join(f"{value:8.4f}" for value in row[:count])


def _spelled(text: str) -> str:
    """A token's text with its leading space shown."""
    return "␣" + printable(text[1:]) if text.startswith(" ") else printable(text)


def _fill(text: str, width: int, *, right: bool = False) -> str:
    space = " " * max(0, width - cell_len(text))
    return space + text if right else text + space
