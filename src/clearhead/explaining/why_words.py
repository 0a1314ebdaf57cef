"""The sentences and the tables that say a `Why`: the terminal prints them, and a notebook shows them."""

from collections.abc import Iterator, Sequence
from typing import Any

from clearhead.digits import fixed, percent, signed
from clearhead.explaining.texts import parts_of, token_name
from clearhead.explaining.why_lists import EdgeEffect, HeadEffect, PartEffect
from clearhead.spelling import bare, cut, spelled
from clearhead.tables import Table
from clearhead.words import Language, say

_NEXT, _PART = 4, 32  # likeliest next tokens; columns of a part in a sentence


def question(seen: Any, language: Language, width: int | None = None) -> str:
    """Why this answer, and how far ahead it is; texts cut to `width` columns."""
    answer, other = (cut(spelled(x), width or len(x) + 80) for x in (seen.answer, seen.other))
    single, lead = _single(seen), seen.lead if _single(seen) else seen.value
    key = ("why against" if lead >= 0 else "why trails") if single or seen.compared else "why"
    facts = {"answer": answer, "share": percent(seen.probability), "against": other, "odds": signed(lead)}
    facts |= {"other": percent(seen.against.probability), "lead": fixed(abs(lead), 2, 9)}
    return say(language, key if single else f"{key} long", **facts)


def most_likely(seen: Any, language: Language) -> str:
    """What the model says next."""
    shares = (f"{spelled(each.text)} {percent(each.probability)}" for each in seen.next[:_NEXT])
    return say(language, "why next", tokens="  ".join(shares))


def parts_table(seen: Any, language: Language, listed: Sequence[PartEffect]) -> Table:
    """Parts of the text: the effect, and what hiding each does."""
    change = "why lead column" if _single(seen) else "why hidden"
    columns = [say(language, key) for key in ("why part", "why effect", change)]
    rows = []
    for part in listed:
        cells = ["", "", ""]
        if part.share is not None and part.likeliest is not None:
            then = f"{cut(spelled(part.likeliest.text), 9)} {percent(part.likeliest.probability)}"
            cells = [signed(_cost(seen, part)), percent(part.share), then]
        rows.append((bare(part.text), signed(part.effect), *cells))
    columns += [_share_of(seen), say(language, "why then")]
    notes = []
    if len(listed) < len(seen.parts):
        rest = sorted((abs(part.effect) for part in seen.parts), reverse=True)[len(listed)]
        key = "why more parts" if len(seen.parts) > len(listed) + 1 else "why more part"
        notes.append(say(language, key, count=len(seen.parts) - len(listed), most=fixed(rest, 2, 9)))
    return Table(say(language, "why parts"), columns, rows, [part.effect for part in listed], notes)


def causes_table(seen: Any, language: Language, kind: str, listed: Sequence[HeadEffect | EdgeEffect]) -> Table:
    """Heads ("carried"), each with its strongest edge, or "edges"."""
    heading = say(language, f"why {kind} sink" if seen.sink else f"why {kind}", first=token_name(seen, 0))
    columns = [say(language, key) for key in ("why head", "why edge", "why weight")]
    columns += [_share_of(seen), say(language, "why lead column" if _single(seen) else "why changes")]
    if not (twice := kind == "edges" and (seen.compared or not _single(seen))):  # it is in the column before
        columns.append(say(language, "why off" if kind == "carried" else "why changes"))
    rows = []
    for one in listed:
        edge = one if isinstance(one, EdgeEffect) else one.edge
        last = [] if twice else [signed(one.truth)]
        cells = ["", "", "", ""]
        if edge is not None:
            cells = [_edge(seen, edge), fixed(edge.weight, 2, 6), percent(edge.share), signed(_cost(seen, edge))]
        rows.append((f"{one.layer}.{one.head}", *cells, *last))
    notes = []
    if seen.sink and kind == "carried":
        facts = {"token": token_name(seen, 0), "sinks": seen.sinks, "heads": seen.by_head.size}
        notes.append(say(language, "why sink", **facts))
    if seen.missed and kind == "edges":
        notes.append(say(language, "why missed"))
    return Table(heading, columns, rows, [-one.truth for one in listed], notes)


def conclusion(seen: Any, language: Language, listed: Sequence[PartEffect]) -> tuple[list[str], list[str]]:
    """What decides, and how far to believe it."""
    said = [*_decides(seen, language, listed), *_either(seen, language)]
    head, edge = seen.carrier, seen.carrier.edge
    facts = {"head": f"{head.layer}.{head.head}", "cost": fixed(-head.truth, 2, 9)}
    if edge is not None and _single(seen) and 4 * edge.truth < head.truth < 0:
        said.append(say(language, "why through", edge=_edge(seen, edge), share=percent(edge.share), **facts))
    elif head.truth < 0:
        said.append(say(language, "why carries", **facts))
    notes = [say(language, "why noise")] if seen.noisy else []
    return said, [*notes, gap_of(seen, language)]


def gap_of(seen: Any, language: Language) -> str:
    """What the effects do not explain, and where they come from."""
    facts = {"gap": signed(seen.gap), "total": signed(seen.total), "points": seen.points}
    return say(language, "why gap" if seen.points else "why gap rows", **facts)


def _single(seen: Any) -> bool:
    """Is one token the answer, and one the other?"""
    return seen.answer == seen.token.text and seen.other == seen.against.text


def _cost(seen: Any, one: PartEffect | EdgeEffect) -> float:
    """What the lead changes by without a part or an edge, or the number y where the answers are longer."""
    change = one.lead if _single(seen) else one.hidden if isinstance(one, PartEffect) else one.truth
    return change or 0.0


def _decides(seen: Any, language: Language, listed: Sequence[PartEffect]) -> Iterator[str]:
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
        facts = {"part": cut(spelled(part.text.strip()), _PART), "share": percent(part.share or 0.0)}
        facts |= {"token": spelled(seen.token.text), "against": cut(spelled(seen.against.text), 20)}
        facts |= {"cost": fixed(-costs[part], 2, 9), "left": fixed(seen.lead + costs[part], 2, 9)}
        said = say(language, key, lead=fixed(seen.lead, 2, 9), **facts)
        yield said if place else say(language, "why so", said=said)


def _either(seen: Any, language: Language) -> Iterator[str]:
    """The strongest pair of parts of which either is enough."""
    for pair in seen.pairs[:1]:
        first, second = (cut(spelled(part.text.strip()), 30) for part in pair[:2])
        one, other = (signed(part.hidden or 0.0) for part in pair[:2])
        facts = {"first": first, "second": second, "one": one, "other": other, "both": signed(pair.hidden)}
        yield say(language, "why either", **facts, token=spelled(seen.token.text), share=percent(pair.share))


def _share_of(seen: Any) -> str:
    return f"p({cut(spelled(seen.token.text), 7)})"


def _edge(seen: Any, edge: EdgeEffect) -> str:
    """Is ← France: the query attends to the key."""
    names = parts_of(seen.tokens, seen.text).names
    names += [seen.model.text(token) for token in seen.based[0].run.ids[len(names) :]]
    return " ← ".join(bare(names[place]) for place in edge[2:4])
