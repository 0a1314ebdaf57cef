"""Why one token and not another, in the terminal: the answer, the text, edges, heads, weights alone, both ways."""

from collections.abc import Iterator

import numpy as np
from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.digits import fixed, percent
from clearhead.explaining.texts import parts_of
from clearhead.explaining.why import EdgeEffect, HeadEffect, Why
from clearhead.report.console import put, title
from clearhead.report.explained import about, fill, split_note
from clearhead.report.heat import colourful, label
from clearhead.report.streams import printable, shown, spelled
from clearhead.report.way import show_ways
from clearhead.words import Language, say

_MOST_TOKENS = 40  # beyond that, only the strongest are shown
_SHOWN_TOKENS = 24
_WIDEST = 24  # of a token's name in the text
_SHOWN_HEADS = 4
_SHOWN_WEIGHTS = 5
_HELPED = np.array([[214, 228, 250], [38, 96, 200]], dtype=np.float64)  # the token, weakly and strongly: blue
_HURT = np.array([[252, 226, 200], [202, 92, 12]], dtype=np.float64)  # the other one: orange, told apart by all eyes


def show(console: Console, seen: Why, language: Language) -> None:
    """Print all of it."""
    for part in (_answer, _tokens, _edges, _heads, _weights):
        for line in part(console, seen, language):
            put(console, line)
        if part is not _weights:
            console.print()
    last = len(seen.tokens) - 1
    show_ways(console, seen.ways, f"{last} {spelled(parts_of(seen.tokens, seen.text).names[last])}", language)


def _answer(_: Console, seen: Why, language: Language) -> Iterator[Text]:
    token, against = seen.token, seen.against
    facts = {"token": spelled(token.text), "against": spelled(against.text), "lead": fixed(abs(seen.lead), 2, 9)}
    shares = {"share": percent(token.probability), "other": percent(against.probability)}
    yield title(say(language, "why" if seen.lead >= 0 else "why not", **facts, **shares))
    helping = next((effect for effect in seen.edges if effect.truth * seen.lead < 0), None)
    if helping:
        query, key = _ends(seen, helping)
        places = {"head": helping.head, "layer": helping.layer, "edge": f"{query} → {key}"}
        left = (seen.lead + helping.truth) * (1 if seen.lead > 0 else -1)
        yield Text(say(language, "why edge", **places, left=_signed(left)))
    yield Text()
    yield from about(seen.model, language)
    for edit in seen.edits:
        yield Text(f"{say(language, 'edits')}  {printable(repr(edit))}")


def _tokens(console: Console, seen: Why, language: Language) -> Iterator[Text]:
    """The text, each token with what its edges do below it; of a long text only the strongest tokens."""
    yield title(say(language, "why tokens", token=spelled(seen.token.text)))
    names, split = parts_of(seen.tokens, seen.text)
    effects = seen.by_token
    kept = np.arange(len(effects))
    if len(effects) > _MOST_TOKENS:
        kept = np.sort(np.argsort(-np.abs(effects), kind="stable")[:_SHOWN_TOKENS])
        yield Text(say(language, "why strongest tokens", count=len(kept), tokens=len(effects)), style="dim")
    high = float(np.abs(effects).max()) or 1.0
    above, below, reached = Text("  "), Text("  "), -1
    for place in kept.tolist():
        number = _signed(float(effects[place]))
        name = printable(spelled(names[place]))
        name = shown("… " if place > reached + 1 else "") + label(name, min(_WIDEST, cell_len(name)))
        width = max(cell_len(name), len(number))
        if cell_len(above.plain) + width > console.width and above.plain.strip():
            yield from _trimmed(above, below)
            above, below = Text("  "), Text("  ")
        above.append(" " * (width - cell_len(name)))
        above.append(name, _shading(console, float(effects[place]) / high))
        below.append(number.rjust(width))
        above.append("  ")
        below.append("  ")
        reached = place
    yield from _trimmed(above, below)
    names_of = {"token": spelled(seen.token.text), "against": spelled(seen.against.text)}
    yield Text(say(language, "why signs", **names_of), style="dim")
    yield from split_note(split, language)


def _trimmed(*lines: Text) -> Iterator[Text]:
    for line in lines:
        line.rstrip()
        yield line


def _edges(console: Console, seen: Why, language: Language) -> Iterator[Text]:
    yield title(say(language, "why edges" if seen.edges else "why no edges"))
    if not seen.edges:
        return
    yield _heading(language, "why head", ("why ends", 27), ("weight", -8), *_EFFECT)
    width = min(12, max(cell_len(printable(_ends(seen, effect)[0])) for effect in seen.edges))
    for effect in seen.edges:
        query, key = _ends(seen, effect)
        ends = fill(f"{label(query, width)}{shown(' → ')}{label(key, 12)}", 27)
        yield Text(f"{_place(effect)}{ends}{_weight(effect)}") + _effect(console, seen, effect)
    first = seen.edges[0]
    yield Text(say(language, "why notation", layer=first.layer, head=first.head), style="dim")
    if seen.agreement is not None:
        yield Text(say(language, "why agreement", count=len(seen.edges), agreement=seen.agreement), style="dim")


def _heads(console: Console, seen: Why, language: Language) -> Iterator[Text]:
    yield title(say(language, "why heads"))
    yield _heading(language, "why head", *_EFFECT)
    for head in seen.heads[:_SHOWN_HEADS]:
        yield Text(_place(head)) + _effect(console, seen, head)


def _weights(_: Console, seen: Why, language: Language) -> Iterator[Text]:
    row = len(seen.tokens) - 1
    yield title(say(language, "why weights", query=f"{row} {spelled(parts_of(seen.tokens, seen.text).names[row])}"))
    rank = (say(language, "why rank", count=seen.run_again), _RANK)
    yield _heading(language, "why head", ("key", 12), ("weight", -10), ("why truth", -11), rank)
    for effect in seen.weights_alone[:_SHOWN_WEIGHTS]:
        key = label(_ends(seen, effect)[1], 12)
        yield Text(f"{_place(effect)}{key}{_weight(effect):>10}{_signed(effect.truth, 11)}{effect.rank:>{-_RANK}}")


_RANK = -24  # the width of the only heading that has a number in it
_EFFECT = (("why estimate", -10), ("why truth", -11), ("why helped", 15))


def _heading(language: Language, first: str, *columns: tuple[str, int]) -> Text:
    """Names of columns, by key or as they are; those of negative width are right-aligned."""
    cells = [fill(f"  {say(language, first)}", 9)]
    for key, width in columns:
        text = say(language, key) if width != _RANK else key
        cells.append(fill(f"  {text}" if key == "why helped" else text, abs(width), right=width < 0))
    return Text("".join(cells).rstrip(), style="dim")


def _ends(seen: Why, effect: EdgeEffect) -> tuple[str, str]:
    """An edge's query and key, each as position and token."""
    names = parts_of(seen.tokens, seen.text).names
    return f"{effect.query} {spelled(names[effect.query])}", f"{effect.key} {spelled(names[effect.key])}"


def _place(effect: EdgeEffect | HeadEffect) -> str:
    return f"  {effect.layer}.{effect.head}".ljust(9)


def _weight(effect: EdgeEffect) -> str:
    return fixed(effect.weight, 3, 7).rjust(8)


def _effect(console: Console, seen: Why, effect: EdgeEffect | HeadEffect) -> Text:
    """The estimate, the truth, and which of both tokens that helped."""
    line = Text(_signed(effect.estimate, 10) + _signed(effect.truth, 11))
    helped = seen.token if effect.truth < 0 else seen.against
    if effect.truth:
        largest = max(abs(x) for x in (*(edge.truth for edge in seen.edges), *(head.truth for head in seen.heads)))
        line.append("  ")
        line.append(label(spelled(helped.text), 13).rstrip(), _shading(console, effect.truth / largest))
    return line


def _signed(number: float, width: int = 0) -> str:
    return (("+" if number > 0 else "") + fixed(number, 2, 9)).rjust(width)


def _shading(console: Console, share: float) -> Style | None:
    """A token's background: from pale to strong by the square root of its share of the largest effect."""
    if not colourful(console) or abs(share) < 1e-3:
        return None
    pale, strong = _HELPED if share < 0 else _HURT
    red, green, blue = pale + (strong - pale) * abs(share) ** 0.5
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    colours = [
        Color.from_rgb(*rgb) for rgb in ((255,) * 3 if dark else (0,) * 3, (round(red), round(green), round(blue)))
    ]
    return Style(color=colours[0], bgcolor=colours[1])
