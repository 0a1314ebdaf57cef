"""Why one token and not another, in the terminal: the answer, the text, edges, heads, weights alone, both ways."""

from collections.abc import Iterator

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.digits import fixed, percent, signed
from clearhead.explaining.texts import parts_of
from clearhead.explaining.why import EdgeEffect, HeadEffect, Why
from clearhead.report.attribution import show_ways
from clearhead.report.cells import background, between, colourful, columns, label, note, title, token_name
from clearhead.report.console import sections
from clearhead.report.explained import about, split_note
from clearhead.report.streams import printable, shown, spelled
from clearhead.words import Language, say

_MOST_TOKENS = 40  # beyond that, only the strongest are shown
_SHOWN_TOKENS = 24
_WIDEST = 24  # of a token's name in the text
_SHOWN_HEADS = 4
_SHOWN_WEIGHTS = 5
_HELPED = (214, 228, 250), (38, 96, 200)  # the token, weakly and strongly: blue
_HURT = (252, 226, 200), (202, 92, 12)  # the other one: orange, told apart by all eyes
_EFFECT = ("why estimate", "why truth", "why helped")


def show(console: Console, seen: Why, language: Language) -> None:
    """Print all of it."""
    sections(console, (part(console, seen, language) for part in (_answer, _tokens, _edges, _heads, _weights)))
    show_ways(console, seen.ways, token_name(seen, len(seen.tokens) - 1), language)


def _answer(_: Console, seen: Why, language: Language) -> Iterator[Text]:
    token, against = seen.token, seen.against
    facts = {"token": spelled(token.text), "against": spelled(against.text), "lead": fixed(abs(seen.lead), 2, 9)}
    shares = {"share": percent(token.probability), "other": percent(against.probability)}
    yield title(say(language, "why" if seen.lead >= 0 else "why not", **facts, **shares))
    helping = next((effect for effect in seen.edges if effect.truth * seen.lead < 0), None)
    if helping:
        edge = f"{token_name(seen, helping.query)} → {token_name(seen, helping.key)}"
        left = signed((seen.lead + helping.truth) * (1 if seen.lead > 0 else -1))
        yield Text(say(language, "why edge", head=helping.head, layer=helping.layer, edge=edge, left=left))
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
        yield note(say(language, "why strongest tokens", count=len(kept), tokens=len(effects)))
    high = float(np.abs(effects).max()) or 1.0
    above, below, reached = Text("  "), Text("  "), -1
    for place in kept.tolist():
        number = signed(float(effects[place]))
        name = spelled(names[place])
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
    yield note(say(language, "why signs", token=spelled(seen.token.text), against=spelled(seen.against.text)))
    yield from split_note(split, language)


def _trimmed(*lines: Text) -> Iterator[Text]:
    for line in lines:
        line.rstrip()
        yield line


def _edges(console: Console, seen: Why, language: Language) -> Iterator[Text]:
    yield title(say(language, "why edges" if seen.edges else "why no edges"))
    if not seen.edges:
        return
    yield _heading(language, (9, 27, -8, -10, -11, 17), "why ends", "weight", *_EFFECT)
    width = min(12, max(cell_len(printable(token_name(seen, effect.query))) for effect in seen.edges))
    for effect in seen.edges:
        query, key = label(token_name(seen, effect.query), width), label(token_name(seen, effect.key), 12)
        cells = [_place(effect), f"{query} → {key}", fixed(effect.weight, 3, 7)]
        yield Text(columns((9, 27, -8), cells)) + _effect(console, seen, effect)
    first = seen.edges[0]
    yield note(say(language, "why notation", layer=first.layer, head=first.head))
    if seen.agreement is not None:
        yield note(say(language, "why agreement", count=len(seen.edges), agreement=seen.agreement))


def _heads(console: Console, seen: Why, language: Language) -> Iterator[Text]:
    yield title(say(language, "why heads"))
    yield _heading(language, (9, -10, -11, 17), *_EFFECT)
    for head in seen.heads[:_SHOWN_HEADS]:
        yield Text(columns((9,), [_place(head)])) + _effect(console, seen, head)


def _weights(_: Console, seen: Why, language: Language) -> Iterator[Text]:
    yield title(say(language, "why weights", query=token_name(seen, len(seen.tokens) - 1)))
    widths = (9, 12, -10, -11, -24)
    yield _heading(language, widths, "key", "weight", "why truth", "why rank", count=seen.run_again)
    for effect in seen.weights_alone[:_SHOWN_WEIGHTS]:
        numbers = fixed(effect.weight, 3, 7), signed(effect.truth), str(effect.rank)
        yield Text(columns(widths, [_place(effect), label(token_name(seen, effect.key), 12), *numbers]))


def _heading(language: Language, widths: tuple[int, ...], *keys: str, **values: object) -> Text:
    """The names of columns; that of the effect stands two cells to the right, as what is below it."""
    cells = [f"{'  ' if key == 'why helped' else ''}{say(language, key, **values)}" for key in keys]
    return note(columns(widths, [f"  {say(language, 'why head')}", *cells]).rstrip())


def _place(effect: EdgeEffect | HeadEffect) -> str:
    return f"  {effect.layer}.{effect.head}"


def _effect(console: Console, seen: Why, effect: EdgeEffect | HeadEffect) -> Text:
    """The estimate, the truth, and which of both tokens that helped."""
    line = Text(columns((-10, -11), [signed(effect.estimate), signed(effect.truth)]))
    helped = seen.token if effect.truth < 0 else seen.against
    if effect.truth:
        truths = [edge.truth for edge in seen.edges] + [head.truth for head in seen.heads]
        line.append("  ")
        line.append(label(spelled(helped.text), 13).rstrip(), _shading(console, effect.truth / max(map(abs, truths))))
    return line


def _shading(console: Console, share: float) -> Style | None:
    """A token's background: from pale to strong by the square root of its share of the largest effect."""
    if not colourful(console) or abs(share) < 1e-3:
        return None
    return background(between(*(_HELPED if share < 0 else _HURT), abs(share) ** 0.5))
