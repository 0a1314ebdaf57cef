"""Why an answer, in the terminal: the question, the parts of the text, edges and heads, a conclusion, both ways."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.digits import fixed, percent, signed
from clearhead.explaining.effects import EdgeEffect, Trust
from clearhead.explaining.texts import parts_of
from clearhead.explaining.why import Why
from clearhead.report.attribution import show_ways
from clearhead.report.cells import background, bar, between, colourful, columns, label, note, title, token_name
from clearhead.report.console import sections
from clearhead.report.explained import about, split_note
from clearhead.report.streams import printable, spelled
from clearhead.words import Language, say

SHOWN_PARTS, SHOWN_EDGES, SHOWN_HEADS = 6, 5, 3
_BAR = 10
_FOR = (214, 228, 250), (38, 96, 200)  # speaks for the answer, weakly and strongly: blue
_OTHER = (252, 226, 200), (202, 92, 12)  # against it: orange, told apart by all eyes


def show(console: Console, seen: Why, language: Language, *, whole: bool = False, trust: Trust | None = None) -> None:
    """Print the answer; with `whole` all parts, edges and heads that were listed, and the way to both tokens."""
    counts = (None, None, None) if whole else (SHOWN_PARTS, SHOWN_EDGES, SHOWN_HEADS)
    opening = [_answer(seen, language), _parts(console, seen, language, counts[0])]
    causes = [_edges(console, seen, language, counts[1]), _heads(console, seen, language, counts[2])]
    sections(console, [*opening, *causes, _conclusion(seen, language, trust)])
    if whole:
        show_ways(console, seen.ways, token_name(seen, len(seen.tokens) - 1), language)


def _answer(seen: Why, language: Language) -> Iterator[Text]:
    facts = {"answer": spelled(seen.answer), "share": percent(seen.probability), "against": spelled(seen.other)}
    facts |= {"other": percent(seen.against.probability), "odds": signed(seen.value)}
    facts["lead"] = fixed(abs(seen.value), 2, 9)
    one = seen.answer == seen.token.text and seen.other == seen.against.text
    key = "why against" if seen.value >= 0 else "why trails"
    key = key if one else f"{key} long"
    if not seen.compared:
        key = "why" if one else "why long"
    yield title(say(language, key, **facts))
    yield from about(seen.model, language)
    for edit in seen.edits:
        yield Text(f"{say(language, 'edits')}  {printable(repr(edit))}")


def _parts(console: Console, seen: Why, language: Language, most: int | None) -> Iterator[Text]:
    yield title(say(language, "why parts"))
    listed = sorted(seen.parts, key=lambda part: -abs(part.effect))[:most]
    widths = (22, -8, _BAR + 2, -9, -11, 0)
    names = {"part": "  {}", "effect": "{}", "": "", "hidden": "{}", "share": _share_of(seen), "then": "  {}"}
    yield _heading(language, widths, names)
    high = _largest(part.effect for part in listed)
    for part in listed:
        line = Text(columns(widths[:2], [f"  {label(printable(part.text), 19)}", signed(part.effect)]))
        line.append(columns((-_BAR - 2,), [bar(abs(part.effect) / high, _BAR).ljust(_BAR)]), _ink(console, part.effect))
        if part.hidden is not None and part.share is not None and part.likeliest is not None:
            then = f"  {spelled(part.likeliest.text)} {percent(part.likeliest.probability)}"
            line.append(columns(widths[3:], [signed(part.hidden), percent(part.share), then]))
        line.rstrip()
        yield line
    if len(listed) < len(seen.parts):
        rest = sorted((abs(part.effect) for part in seen.parts), reverse=True)[len(listed)]
        yield note(say(language, "why more parts", count=len(seen.parts) - len(listed), most=fixed(rest, 2, 9)))
    if seen.sink:
        facts = {"token": token_name(seen, 0), "sinks": seen.sinks, "heads": seen.by_head.size}
        yield note(say(language, "why sink", **facts))
    yield from split_note(parts_of(seen.tokens, seen.text).split, language)


def _edges(console: Console, seen: Why, language: Language, most: int | None) -> Iterator[Text]:
    listed, widths = seen.edges[:most], (9, 28, -8, -11, -11)
    yield title(say(language, "why edges sink" if seen.sink else "why edges", first=token_name(seen, 0)))
    names = {
        "head": "  {}",
        "edge": "{}",
        "weight": "{}",
        "changes": "{}",
        "share": _share_of(seen),
    }
    yield _heading(language, widths, names)
    high = _largest(edge.truth for edge in listed)
    for edge in listed:
        numbers = [fixed(edge.weight, 2, 7), signed(edge.truth), percent(edge.share)]
        cells = [f"  {edge.layer}.{edge.head}", label(_edge(seen, edge), 27), *numbers]
        yield _with_bar(console, columns(widths, cells), edge.truth, high)
    if seen.missed:
        yield note(say(language, "why missed"))


def _heads(console: Console, seen: Why, language: Language, most: int | None) -> Iterator[Text]:
    listed, widths = seen.heads[:most], (9, -37, -11, 9)
    yield title(say(language, "why heads"))
    yield _heading(language, widths, {"head": "  {}", "effect": "{}", "changes": "{}"})
    high = _largest(head.truth for head in listed)
    for head in listed:
        cells = [f"  {head.layer}.{head.head}", signed(head.effect), signed(head.truth), ""]
        yield _with_bar(console, columns(widths, cells), head.truth, high)


def _conclusion(seen: Why, language: Language, trust: Trust | None) -> Iterator[Text]:
    hidden = [part for part in seen.parts if part.hidden is not None and part.hidden < 0]
    strongest = min(hidden, key=lambda part: part.hidden or 0.0, default=None)
    if strongest is not None:
        facts = {"part": spelled(strongest.text.strip()), "share": percent(strongest.share or 0.0)}
        facts |= {"token": spelled(seen.token.text), "change": signed(strongest.hidden or 0.0)}
        yield Text(say(language, "why so" if seen.answer == seen.token.text else "why so long", **facts))
    yield from _either(seen, language)
    edge = seen.edges[0] if seen.edges else None
    if edge is not None and edge.truth:
        facts = {"edge": _edge(seen, edge), "head": f"{edge.layer}.{edge.head}", "share": percent(edge.share)}
        yield Text(say(language, "why through" if edge.truth < 0 else "why held", **facts))
    if seen.noisy:
        yield note(say(language, "why noise"))
    yield note(say(language, "why gap", gap=signed(seen.gap), total=signed(seen.total), points=seen.points))
    if trust is not None:
        score = "–" if trust.score is None else f"{trust.score:.2f}"
        yield note(say(language, "why trust", masks=trust.masks, score=score))


def _either(seen: Why, language: Language) -> Iterator[Text]:
    """The strongest pair of parts of which either is enough."""
    for pair in seen.pairs[:1]:
        first, second = (label(spelled(part.text.strip()), 30).rstrip() for part in pair[:2])
        one, other = (signed(part.hidden or 0.0) for part in pair[:2])
        facts = {"first": first, "second": second, "one": one, "other": other, "both": signed(pair.hidden)}
        yield Text(say(language, "why either", **facts, token=spelled(seen.token.text), share=percent(pair.share)))


def _share_of(seen: Why) -> str:
    return f"p({label(spelled(seen.token.text), 7).rstrip()})"


def _heading(language: Language, widths: Sequence[int], names: dict[str, str]) -> Text:
    """The names of columns, each in its own words or in those of its key."""
    cells = [form.format(say(language, f"why {key}")) if "{}" in form else form for key, form in names.items()]
    return note(columns(widths, cells).rstrip())


def _largest(numbers: Iterable[float]) -> float:
    return max(map(abs, numbers), default=0.0) or 1.0


def _with_bar(console: Console, line: str, change: float, high: float) -> Text:
    """A line with the bar of what changes without something: blue where that spoke for the answer."""
    made = Text(f"{line}  ")
    made.append(bar(abs(change) / high, _BAR), _ink(console, -change))
    made.rstrip()
    return made


def _edge(seen: Why, edge: EdgeEffect) -> str:
    """Is ← France: the query attends to the key."""
    names = parts_of(seen.tokens, seen.text).names
    names += [seen.model.text(token) for token in seen.based[0].run.ids[len(names) :]]
    query, key = (spelled(names[place].strip() or names[place]) for place in edge[2:4])
    return f"{query} ← {key}"


def _ink(console: Console, x: float) -> Style | None:
    """Blue for what speaks for the answer, orange for what speaks against it."""
    if not colourful(console):
        return None
    return Style(color=background(between(*(_FOR if x > 0 else _OTHER), 1.0)).bgcolor)
