"""An explanation in the terminal: the answer, then tokens, the layer's steps, one head's weights, one token's sum."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from clearhead.core.axes import Array, named
from clearhead.digits import fixed
from clearhead.explaining.explanation import Explanation
from clearhead.explaining.gpt2 import SHIPPED, Model
from clearhead.explaining.texts import Split, parts_of
from clearhead.report import answer
from clearhead.report.console import put, title
from clearhead.report.heat import MOST_NUMBERS, RAMP, cell_width, colourful, label, numbers, pixels
from clearhead.report.streams import printable, shown, spelled
from clearhead.words import Language, formula, say

if TYPE_CHECKING:
    from clearhead.explaining.hub import HubModel

_SHOWN_VALUES = 4
_SHOWN_KEYS = 8


def show(console: Console, seen: Explanation, language: Language) -> None:
    """Print all of it, the answer first."""
    for part in (answer.lines, opening, _layer, _weights, _arithmetic):
        for line in part(console, seen, language):
            put(console, line)
        if part is not _arithmetic:
            console.print()


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
    if cell_width(console, len(cols)) and len(rows) <= 2 * MOST_NUMBERS:
        yield from numbers(console, weights, masked, rows, cols)
        pooled, ramp, drawn = weights, "", False
    else:
        lines, pooled = pixels(console, weights, masked, rows, cols)
        yield from lines
        drawn = colourful(console)
        ramp = "" if drawn else RAMP
    visible = weights[~masked & np.isfinite(weights)]
    low, high = (float(visible.min()), float(visible.max())) if visible.size else (0.0, 0.0)
    kind = "legend ramp" if ramp else "legend" if colourful(console) else "legend plain"
    legend = [say(language, kind, low=low, high=high, ramp=ramp)]
    if masked.any():
        legend.append(say(language, "masked pixel" if drawn else "masked cell"))
    if np.isnan(weights[~masked]).any() and (drawn or ramp):
        legend.append(say(language, "nan pixel" if drawn else "nan cell"))
    yield Text("  ".join(legend), style="dim")
    if pooled.shape != weights.shape:
        ratio = {"rows": weights.shape[0] / pooled.shape[0], "cols": weights.shape[1] / pooled.shape[1]}
        yield Text(say(language, "pooled", **ratio), style="dim")


def about(model: "Model | HubModel", language: Language) -> Iterator[Text]:
    """The model's name and sizes."""
    config = model.config
    yield title(
        say(language, "model", name=model.name, layers=config.layers, heads=config.heads, d_model=config.d_model)
    )
    if model.name == SHIPPED:
        yield Text(say(language, "illustration"), style="dim")


def split_note(split: Split | None, language: Language) -> Iterator[Text]:
    """A sentence on characters that the tokenizer split into bytes."""
    if split:
        safe = split._replace(first=printable(split.first), character=printable(split.character))
        yield Text(say(language, "split", **safe._asdict()), style="dim")


def opening(console: Console, seen: Explanation, language: Language) -> Iterator[Text]:
    """The model, and the text as its tokens."""
    yield from about(seen.model, language)
    yield Text()
    lead = say(language, "tokens") + "  "
    names, split = parts_of(seen.tokens, seen.text)
    yield from wrapped(console, lead, [f"{i} {spelled(name)}   " for i, name in enumerate(names)])
    yield from split_note(split, language)
    if seen.generated:
        yield Text(say(language, "generated", count=seen.generated), style="dim")


def _layer(_: Console, seen: Explanation, language: Language) -> Iterator[Text]:
    yield title(say(language, "layer", layer=seen.layer, heads=seen.model.config.heads))
    for step in seen.steps:
        shape = named(step.shape, step.axes)
        yield Text(f"  {fill(formula(language, step.formula), 38)}{shape}")
        yield Text(f"      {say(language, step.words)}", style="dim")


def _weights(console: Console, seen: Explanation, language: Language) -> Iterator[Text]:
    yield title(
        say(language, "head", head=seen.head, layer=seen.layer)
        + f"  {named(seen.trace.weights.shape, ('queries', 'keys'))}"
    )
    visible = int((~np.isneginf(seen.row.masked)).sum())
    entropy = float(seen.entropy[seen.layer, seen.head])
    facts = {"token": seen.token, "entropy": entropy, "most": float(np.log(max(1, visible)))}
    yield Text(say(language, "sharpest" if seen.chosen[1] else "entropy", **facts), style="dim")
    names = parts_of(seen.tokens, seen.text).names
    masked = np.isneginf(seen.trace.masked)
    yield from matrix_lines(console, seen.trace.weights, masked, names, names, language)
    yield Text(f"{say(language, 'axes')}{say(language, 'also')}{_sums(seen, language)}", style="dim")


def _sums(seen: Explanation, language: Language) -> str:
    """A sentence on what the rows of A sum to."""
    attending = ~np.isneginf(seen.trace.masked).all(axis=-1)
    return sum_words(language, seen.trace.weights.sum(axis=-1)[attending], rows=True, sinks="sinks" in seen.run.rules)


def sum_words(language: Language, sums: Array, *, rows: bool, sinks: bool = False) -> str:
    """A sentence on what each query's weights sum to; `rows` says whether a query's weights are a row or a column."""
    which, low, high = "rows" if rows else "columns", float(sums.min(initial=1)), float(sums.max(initial=0))
    deviation = float(np.abs(sums - 1).max(initial=0))
    if sinks:
        return say(language, f"{which} sum sinks", low=low, high=high)
    if deviation > 1e-6:  # weights that were given; those that were computed are nearer
        return say(language, f"{which} sum off", low=low, high=high)
    return say(language, f"{which} sum", deviation=deviation)


def _arithmetic(_: Console, seen: Explanation, language: Language) -> Iterator[Text]:
    row, names = seen.row, parts_of(seen.tokens, seen.text).names
    name = f"{seen.token} {spelled(names[seen.token])}"
    yield title(say(language, "how", token=name))
    width = row.contributions.shape[-1]
    count = min(_SHOWN_VALUES, width)
    d_k = seen.trace.q.shape[-1]
    plain = not {"softcap", "bias", "alibi_slopes"} & set(seen.run.rules)
    default = bool((abs(seen.trace.problem.scale * d_k**0.5 - 1) < 1e-12).all())
    scale = shown(f"q·k/√{d_k}" if default else "scale·q·k") if plain else "logit"
    head = say(language, "contribution", count=count, width=width)
    columns = fill(say(language, "key"), 12), fill(say(language, "weight"), 10, right=True)
    yield Text(f"  {columns[0]}{'q·k':>9}{scale if len(scale) < 10 else 'scaled':>10}{columns[1]}  {head}")
    visible = np.flatnonzero(~np.isneginf(row.masked))
    order = visible[np.argsort(-row.weights[visible], kind="stable")]
    for j in order[:_SHOWN_KEYS]:
        lead = label(f"{j} {spelled(names[j])}", 12)
        figures = figure(row.scores[j], 3, 9) + figure(row.masked[j], 4, 10) + figure(row.weights[j], 4, 10)
        yield Text(f"  {lead}{figures}  {_values(row.contributions[j], count)}")
    rest = order[_SHOWN_KEYS:]
    if len(rest):
        more = fill("  " + say(language, "more", count=len(rest)), 33)
        together = _values(row.contributions[rest].sum(axis=0), count)
        yield Text(f"{more}{figure(row.weights[rest].sum(), 4, 10)}  {together}")
    total = fill("  Σ = o", 33)
    yield Text(f"{total}{figure(row.weights.sum(), 4, 10)}  {_values(row.output, count)}", style="bold")
    yield Text(say(language, "agree", difference=row.difference), style="dim")
    engine, difference = seen.trace.check
    yield Text(say(language, "check", engine=engine, difference=difference), style="dim")


def _values(row: Array, count: int) -> str:
    return " ".join(fixed(float(value), 4, 8).rjust(8) for value in row[:count])


def figure(number: float, decimals: int, width: int) -> str:
    """A number, right-aligned in its column, with a space before it."""
    return fixed(float(number), decimals, width - 1).rjust(width)


def fill(text: str, width: int, *, right: bool = False) -> str:
    """Text as a column of this width."""
    text = shown(text)
    space = " " * max(0, width - cell_len(text))
    return space + text if right else text + space
