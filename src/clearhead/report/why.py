"""Why an answer, in the terminal: the question, the parts of the text, edges and heads, a conclusion, both ways."""

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.digits import fixed, percent, signed
from clearhead.explaining.effects import EdgeEffect, HeadEffect, PartEffect, Trust
from clearhead.explaining.texts import parts_of
from clearhead.explaining.why import Why
from clearhead.report.cells import bar, colourful, columns, label, note, rgb, title, token_name
from clearhead.report.console import folded, sections
from clearhead.report.explained import about, more_note, split_note
from clearhead.report.streams import printable, spelled
from clearhead.words import Language, say

_LINES = 25  # of the first screen
_COUNTS = ((6, 5), (6, 4), (5, 4), (5, 3), (4, 3), (3, 3), (2, 2), (1, 1))  # parts and heads on it: the most that fit
_ANSWER, _PART = 60, 32  # columns of the answer and of a part in a sentence of it
_NEXT = 4  # likeliest next tokens
_BAR, _NAME = 10, 19
_FOR, _OTHER = (38, 96, 200), (202, 92, 12)  # blue speaks for the answer, orange against it: all eyes tell them apart


def show(console: Console, seen: Why, language: Language, *, whole: bool, more: bool, trust: Trust | None) -> None:
    """Print the answer on one screen, or with `whole` all parts, heads and edges that were listed.

    more   end with the options that show more
    """
    last = [more_note(seen.carrier, language)] * more
    if trust is not None:
        score = "–" if trust.score is None else f"{trust.score:.2f}"
        last.insert(0, note(say(language, "why trust", masks=trust.masks, score=score)))
    for parts, heads in [(None, None)] if whole else _COUNTS:
        listed = sorted(seen.parts, key=lambda part: -abs(part.effect))[:parts]
        opening = _answer(seen, language, None if whole else _ANSWER)
        screen = [[*opening], [*_parts(console, seen, language, listed)]]
        screen.append([*_causes(console, seen, language, "carried", seen.heads[:heads])])
        screen += [[*_causes(console, seen, language, "edges", seen.edges)]] * whole
        screen.append([*_conclusion(seen, language, listed), *last])
        if sum(len(folded(console, line)) for part in screen for line in part) + len(screen) - 1 <= _LINES:
            break
    sections(console, map(iter, screen))


def _answer(seen: Why, language: Language, width: int | None) -> Iterator[Text]:
    answer, other = (label(spelled(x), width or len(x) + 80).rstrip() for x in (seen.answer, seen.other))
    single, lead = _single(seen), seen.lead if _single(seen) else seen.value
    key = ("why against" if lead >= 0 else "why trails") if single or seen.compared else "why"
    facts = {"answer": answer, "share": percent(seen.probability), "against": other, "odds": signed(lead)}
    facts |= {"other": percent(seen.against.probability), "lead": fixed(abs(lead), 2, 9)}
    yield title(say(language, key if single else f"{key} long", **facts))
    shares = (f"{spelled(each.text)} {percent(each.probability)}" for each in seen.next[:_NEXT])
    yield Text(say(language, "why next", tokens="  ".join(shares)))
    yield from about(seen.model, language)
    for edit in seen.edits:
        yield Text(f"{say(language, 'edits')}  {printable(repr(edit))}")


def _parts(console: Console, seen: Why, language: Language, listed: Sequence[PartEffect]) -> Iterator[Text]:
    yield title(say(language, "why parts"))
    wide = any(cell_len(printable(part.text)) > _NAME for part in listed)  # then there is no room for bars
    size, high = 0 if wide else _BAR + 2, _largest(part.effect for part in listed)
    name = _NAME + _BAR + 2 - size
    widths, change = (name + 3, -8, size, -9, -11, 0), "lead column" if _single(seen) else "hidden"
    names = {"part": "  {}", "effect": "{}", "": "", change: "{}", "share": _share_of(seen), "then": "  {}"}
    yield _heading(language, widths, names)
    for part in listed:
        line = Text(columns(widths[:2], [f"  {label(printable(part.text), name)}", signed(part.effect)]))
        if not wide:
            shape = bar(abs(part.effect) / high, _BAR).ljust(_BAR)
            line.append(columns((-size,), [shape]), _ink(console, part.effect))
        if part.share is not None and part.likeliest is not None:
            then = f"  {label(spelled(part.likeliest.text), 9).rstrip()} {percent(part.likeliest.probability)}"
            line.append(columns(widths[3:], [signed(_cost(seen, part)), percent(part.share), then]))
        line.rstrip()
        yield line
    if len(listed) < len(seen.parts):
        rest = sorted((abs(part.effect) for part in seen.parts), reverse=True)[len(listed)]
        key = "why more parts" if len(seen.parts) > len(listed) + 1 else "why more part"
        yield note(say(language, key, count=len(seen.parts) - len(listed), most=fixed(rest, 2, 9)))
    yield from split_note(parts_of(seen.tokens, seen.text).split, language)


def _causes(
    console: Console, seen: Why, language: Language, kind: str, listed: Sequence[HeadEffect | EdgeEffect]
) -> Iterator[Text]:
    """Heads, each with its strongest edge, or edges."""
    key, widths = f"why {kind} sink" if seen.sink else f"why {kind}", (8, 23, -7, -11, -10, -11)
    yield title(say(language, key, first=token_name(seen, 0)))
    names = {"head": "  {}", "edge": "{}", "weight": "{}", "share": _share_of(seen)}
    names["lead column" if _single(seen) else "changes"] = "{}"
    twice = kind == "edges" and (seen.compared or not _single(seen))  # the change is in the column before
    yield _heading(language, widths, names | ({} if twice else {"off" if kind == "carried" else "changes": "{}"}))
    high = _largest(one.truth for one in listed)
    for one in listed:
        edge = one if isinstance(one, EdgeEffect) else one.edge
        cells = [f"  {one.layer}.{one.head}", *[""] * 4, "" if twice else signed(one.truth)]
        if edge is not None:
            cells[1:3] = label(_edge(seen, edge), 22), fixed(edge.weight, 2, 6)
            cells[3:5] = percent(edge.share), signed(_cost(seen, edge))
        line = Text(f"{columns(widths, cells)}  ")
        line.append(bar(abs(one.truth) / high, 8), _ink(console, -one.truth))
        line.rstrip()
        yield line
    if seen.sink and kind == "carried":
        facts = {"token": token_name(seen, 0), "sinks": seen.sinks, "heads": seen.by_head.size}
        yield note(say(language, "why sink", **facts))
    if seen.missed and kind == "edges":
        yield note(say(language, "why missed"))


def _single(seen: Why) -> bool:
    """Is one token the answer, and one the other?"""
    return seen.answer == seen.token.text and seen.other == seen.against.text


def _cost(seen: Why, one: PartEffect | EdgeEffect) -> float:
    """What the lead changes by without a part or an edge, or the number y where the answers are longer."""
    change = one.lead if _single(seen) else one.hidden if isinstance(one, PartEffect) else one.truth
    return change or 0.0


def _conclusion(seen: Why, language: Language, listed: Sequence[PartEffect]) -> Iterator[Text]:
    yield from _decides(seen, language, listed)
    yield from _either(seen, language)
    head, edge = seen.carrier, seen.carrier.edge
    facts = {"head": f"{head.layer}.{head.head}", "cost": fixed(-head.truth, 2, 9)}
    if edge is not None and _single(seen) and 4 * edge.truth < head.truth < 0:
        yield Text(say(language, "why through", edge=_edge(seen, edge), share=percent(edge.share), **facts))
    elif head.truth < 0:
        yield Text(say(language, "why carries", **facts))
    if seen.noisy:
        yield note(say(language, "why noise"))
    yield note(say(language, "why gap", gap=signed(seen.gap), total=signed(seen.total), points=seen.points))


def _decides(seen: Why, language: Language, listed: Sequence[PartEffect]) -> Iterator[Text]:
    """The part that costs the answer most when it is hidden, and one that costs probability but little of the lead."""
    costs = {part: _cost(seen, part) for part in listed if part.share is not None}
    keys: dict[str, PartEffect] = {}
    if costs:
        part, asks = min(costs, key=lambda part: costs[part]), min(costs, key=lambda part: part.share or 0.0)
        left = seen.lead + costs[part]
        if costs[part] < 0 and _single(seen):
            key = "why passed" if left < 0 < seen.lead else "why picks" if 2 * left < seen.lead else "why spread"
            keys[key] = part
        elif costs[part] < 0:
            keys["why alone"] = part
        little = -2 * costs[asks] < min(seen.lead, abs(costs[part]))
        if _single(seen) and little and 2 * (asks.share or 0.0) < seen.token.probability:
            keys["why asks"] = asks
    for place, (key, part) in enumerate(keys.items()):
        facts = {"part": label(spelled(part.text.strip()), _PART).rstrip(), "share": percent(part.share or 0.0)}
        facts |= {"token": spelled(seen.token.text), "against": label(spelled(seen.against.text), 20).rstrip()}
        facts |= {"cost": fixed(-costs[part], 2, 9), "left": fixed(seen.lead + costs[part], 2, 9)}
        said = say(language, key, lead=fixed(seen.lead, 2, 9), **facts)
        yield Text(said if place else say(language, "why so", said=said))


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


def _edge(seen: Why, edge: EdgeEffect) -> str:
    """Is ← France: the query attends to the key."""
    names = parts_of(seen.tokens, seen.text).names
    names += [seen.model.text(token) for token in seen.based[0].run.ids[len(names) :]]
    query, key = (spelled(names[place].strip() or names[place]) for place in edge[2:4])
    return f"{query} ← {key}"


def _ink(console: Console, x: float) -> Style | None:
    """Blue for what speaks for the answer, orange for what speaks against it."""
    return Style(color=rgb(_FOR if x > 0 else _OTHER)) if colourful(console) else None
