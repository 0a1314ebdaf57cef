"""Writes an `Explanation` as sentences and tables, which the terminal prints and a notebook shows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clearhead.digits import fixed, percent, signed
from clearhead.explaining.answers import WORD, decides, probability
from clearhead.explaining.rerun import EdgeEffect, HeadEffect, PartEffect, by_change
from clearhead.explaining.texts import parts_of, token_name
from clearhead.models.model import SHIPPED
from clearhead.spelling import bare, cells, cut, spelled
from clearhead.tables import Table
from clearhead.words import Language, say

_NEXT, _PART, ANSWER = 4, 120, 40  # likeliest next tokens; columns of a part and of the answer in a sentence
_INSIDE, _WITHIN = 2, 0.1  # parts shown inside a sentence, and the least share of the sentence's change for each
_MUCH = 0.5  # share of a sentence's change above which one part in it is named
_HALF, _NEEDED = 0.5, 4  # an answer needs a part without which less than this is left; so many of these are named
_LEAST = 16  # columns of the text before an answer
_STRANGE = 6.0  # mean nats per token above which a text is no rhyme
CARRIES = 0.1  # a head is shown, or carries the answer, from this share of the strongest part's change on


def question(seen: Any, language: Language, width: int | None = None) -> str:
    """Ask why this answer follows, and say how likely it is; texts are cut to `width` columns."""
    answer, other = (cut(spelled(x), width or len(x) + 80) for x in (seen.answer, seen.rivals.other))
    share = percent(seen.rivals.token.probability) if _single(seen) else _facts(seen, language)["after"]
    facts = {"answer": answer, "share": share, "against": other}
    facts |= {"other": percent(seen.rivals.against.probability), "ratio": ratio(seen.value)}
    if _single(seen):
        ahead = seen.rivals.token.probability >= seen.rivals.against.probability
        return say(language, "why against" if ahead else "why trails", **facts)
    return say(language, "why against long" if seen.rivals.compared else "why long", **facts)


def ratio(value: float) -> str:
    """Write how many times as likely one answer is as another, given the difference of their logarithms."""
    return fixed(float(np.exp(min(value, 700.0))), 2, 9)


def leaks(seen: Any, language: Language) -> list[str]:
    """Say how far hiding leaks, if the model mixes tokens outside attention; else nothing."""
    shown = seen.leak and dict(zip(("hidden", "seen"), (fixed(each, 2, 9) for each in seen.leak), strict=True))
    return [say(language, "why leak", **shown)] if shown else []


def most_likely(seen: Any, language: Language) -> str:
    """List the likeliest next tokens."""
    shares = (f"{spelled(each.text)} {percent(each.probability)}" for each in seen.next[:_NEXT])
    dated = [say(language, "dated")] if seen.reading.dated else []
    return "; ".join([say(language, "why next", tokens="  ".join(shares)), *dated])


def parts_table(seen: Any, language: Language, count: int | None = None, *, effects: bool = False) -> Table:
    """List what hiding each part of the text did; with `effects`, also its effect together with the other parts."""
    shown = listed(seen, count)
    columns = [say(language, "why part"), of_answer(seen, language), say(language, "why then")]
    columns[1:1] = [say(language, "why effect")] * effects
    rows = []
    for part, within in shown:
        name = bare(part.text) if not part.replaced else f"{bare(part.text)} → {spelled(part.replaced)}"
        cells = ["", ""]
        if part.likeliest is not None:
            then = f"{cut(spelled(part.likeliest.text), 12)} {percent(part.likeliest.probability)}"
            cells = [so_likely(seen, part.hidden or 0.0), then]
        rows.append(("  " * within + name, *[signed(part.effect)] * effects, *cells))
    notes = []
    if any(part.replaced for part, _ in shown):
        notes.append(say(language, "why replaced"))
    if seen.groups:
        notes.append(say(language, "why groups"))
    printed = {part.tokens for part, _ in shown}
    rest = [part for part in seen.ranked if part.tokens not in printed]
    if rest and rest[0].hidden is not None:
        key = "why more parts" if len(rest) > 1 else "why more part"
        notes.append(say(language, key, count=len(rest), share=so_likely(seen, rest[0].hidden)))
    bars = [part.effect if part.hidden is None else -part.hidden for part, _ in shown]
    return Table(say(language, "why parts"), columns, rows, bars, notes)


def inside(seen: Any, group: PartEffect) -> list[PartEffect]:
    """Return the parts of a group that were also hidden alone, the largest change first."""
    held = set(group.tokens) if group in seen.groups else set()
    return by_change([part for part in seen.parts if part.hidden is not None and part.tokens[0] in held])


def listed(seen: Any, count: int | None = None) -> list[tuple[PartEffect, bool]]:
    """List the first ranked parts, each followed by the strongest parts inside it, which are marked True."""
    made: list[tuple[PartEffect, bool]] = []
    for part in seen.ranked:
        least = _WITHIN * abs(part.hidden or 0.0)
        held = [(one, True) for one in inside(seen, part)[:_INSIDE] if abs(one.hidden or 0.0) >= least]
        made += [(part, False), *held]
    return made[:count]


def causes_table(seen: Any, language: Language, kind: str, causes: Sequence[HeadEffect | EdgeEffect]) -> Table:
    """List heads ("carried"), each with its strongest edge, or edges ("edges")."""
    heading = say(language, f"why {kind} sink" if seen.sink else f"why {kind}", first=token_name(seen, 0))
    columns = [say(language, key) for key in ("why head", "why edge", "why weight", "why without")]
    columns += [say(language, "why off")] * (kind == "carried")
    rows = []
    for one in causes:
        edge = one if isinstance(one, EdgeEffect) else one.edge
        cells = ["", "", ""]
        if edge is not None:
            cells = [_edge(seen, edge), fixed(edge.weight, 2, 6), so_likely(seen, edge.truth)]
        rows.append((f"{one.layer}.{one.head}", *cells, *[so_likely(seen, one.truth)] * (kind == "carried")))
    notes = []
    if kind == "carried" and any(one.needed for one in causes if isinstance(one, HeadEffect)):
        needed = (f"{one.layer}.{one.head}" for one in causes if isinstance(one, HeadEffect) and one.needed)
        notes.append(say(language, "why needed", heads=", ".join(needed)))
    return Table(heading, columns, rows, [-one.truth for one in causes], notes)


def answer_line(seen: Any, language: Language, width: int) -> str:
    """Write the end of the text, the answer and how likely it is, in `width` columns if they suffice."""
    key, facts = "why line of two" if seen.rivals.compared else "why line", _facts(seen, language)
    facts |= {"answer": cut(bare(seen.answer), ANSWER), "other": facts["other"].strip("“”")}
    text = bare(seen.text if isinstance(seen.prompt, str) else seen.prompt[-1]["content"])
    room = max(_LEAST, width - sum(cells(say(language, key, **facts, text=""))))
    end = cut(text[::-1], room)[::-1]
    return say(language, key, **facts, text=text if end == text else f"…{end.partition(' ')[2] or end[1:]}")


def strange(seen: Any) -> bool:
    """Does the shipped model read a text unlike its nursery rhymes, so that the tokens surprise it?"""
    if seen.model.name != SHIPPED:
        return False
    ids = [token.id for token in seen.tokens]
    logits = np.asarray(seen.again.based[0].run.logits[: len(ids) - 1], np.float64)
    chosen = logits[np.arange(len(ids) - 1), ids[1:]]
    return bool(len(ids) > 1 and (np.logaddexp.reduce(logits, axis=-1) - chosen).mean() > _STRANGE)


def part_lines(seen: Any, language: Language, count: int | None = None) -> list[str]:
    """Say in a sentence for each of the first parts what is left of the answer without it."""
    run = [part for part in seen.ranked if part.hidden is not None]
    lines = [_line(seen, language, _without(seen, language, part), part) for part in run[:count]]
    rest = len(run) - len(lines)
    return [*lines, say(language, "why less" if rest > 1 else "why one less", count=rest)] if rest else lines


def head_lines(seen: Any, language: Language, count: int | None = None) -> list[str]:
    """Say what is left of the answer without each head that takes a tenth of what the strongest part takes.

    The head that carries the answer is always among them.
    """
    least = CARRIES * min((part.hidden or 0.0 for part in seen.ranked), default=0.0)
    lines, carrier = [], seen.carrier
    some = [one for one in seen.heads if one.truth < min(least, 0.0)][:count]
    if carrier is not None and carrier not in some:
        some[-1:] = [carrier]
    for one in some:
        through = one.edge is not None and 2 * one.edge.truth <= one.truth
        facts = {"head": f"{one.layer}.{one.head}", "edge": _edge(seen, one.edge) if through else ""}
        key = "why needed off" if one.needed else "why edge off" if through else "why head off"
        lines.append(_line(seen, language, say(language, key, **facts), one))
    return lines


def _line(seen: Any, language: Language, without: str, one: PartEffect | HeadEffect) -> str:
    """Without “France”: Paris falls to 0.2%, and London leads with 40%."""
    change = one.truth if isinstance(one, HeadEffect) else one.hidden or 0.0
    facts = _facts(seen, language, change) | {"without": f"{without[:1].upper()}{without[1:]}"}
    if seen.rivals.compared:
        return say(language, "why times as likely", **facts)
    if isinstance(one, PartEffect) and one.likeliest is not None and change < 0:
        then, name = one.likeliest, bare(one.likeliest.text)
        if then.text.strip() and name.casefold() != bare(seen.rivals.token.text).casefold():
            leader = f"“{name}…”" if one.begins else f"“{name}”"
            return say(language, "why passed", **facts, leader=leader, share=percent(then.probability))
    key = "stays" if facts["before"] == so_likely(seen, change) else "falls" if change < 0 else "rises"
    return say(language, f"why {key}", **facts)


def conclusion(seen: Any, language: Language) -> list[str]:
    """Conclude from the runs: the parts that are needed, a pair of which one is enough, the head that carries it."""
    run = [part for part in seen.ranked if part.hidden is not None]
    said = [say(language, "why so", said=_needs(seen, language, run))] if run else []
    for pair in [pair for pair in seen.pairs if seen.rivals.compared or decides(seen.value, pair.hidden)][:1]:
        first, second = (_named(seen, language, part) for part in sorted(pair[:2], key=lambda part: part.start))
        facts, key = _facts(seen, language, pair.hidden), "why either of two" if seen.rivals.compared else "why either"
        said.append(say(language, key, **facts, first=first, second=second))
    return [*said, _carries(seen, language)]


def _needs(seen: Any, language: Language, run: Sequence[PartEffect]) -> str:
    """Name the parts without any of which less than half of the answer is left, or say that there are none."""
    needed = [part for part in run if left(seen, part.hidden or 0.0) < _HALF]
    facts = _facts(seen, language)
    if needed:
        names = [_named(seen, language, part) for part in needed[:_NEEDED]]
        if len(needed) > _NEEDED:
            names.append(say(language, "why others", count=len(needed) - _NEEDED))
        *first, last = names
        parts = say(language, "why and", first=say(language, "why list").join(first), last=last) if first else last
        kind = ("one" if len(needed) == 1 else "each") + " of two" * seen.rivals.compared
        return say(language, f"why needs {kind}", **facts, parts=parts)
    part = min(run, key=lambda one: one.hidden or 0.0)
    if (part.hidden or 0.0) >= 0:
        return say(language, "why none", **facts)
    facts = _facts(seen, language, part.hidden or 0.0) | {"without": _without(seen, language, part)}
    return say(language, "why little of two" if seen.rivals.compared else "why little", **facts)


def left(seen: Any, change: float) -> float:
    """Return the share of the answer's probability left after this change of y; for two answers, of their ratio."""
    if seen.rivals.compared:
        return float(np.exp(change))
    count = shared_by(seen)
    return probability(seen.value + change, count) / probability(seen.value, count)


def _named(seen: Any, language: Language, part: PartEffect) -> str:
    """Quote a part, “have”; if the text has it more than once, say which one it is."""
    name, parts = cut(bare(part.text), _PART), seen.groups if part in seen.groups else seen.parts
    alike = [one.tokens for one in parts if bare(one.text).casefold() == bare(part.text).casefold()]
    if len(alike) > 1:
        return say(language, "why repeated", part=name, place=alike.index(part.tokens) + 1, count=len(alike))
    return say(language, "why replaced part" if part.replaced else "why quoted", part=name)


def gap_of(seen: Any, language: Language) -> str:
    """Say where the effects come from, and what they do not explain."""
    gap = signed(round(seen.estimate.gap, 9))  # a gap by rounding alone becomes 0
    facts = {"gap": gap, "total": signed(seen.estimate.total), "points": seen.estimate.points}
    return say(language, "why gap" if seen.estimate.points else "why gap rows", **facts)


def _single(seen: Any) -> bool:
    """Is each answer a single token?"""
    return bool(seen.answer == seen.rivals.token.text and seen.rivals.other == seen.rivals.against.text)


def so_likely(seen: Any, change: float = 0.0) -> str:
    """Write how likely the answer is after this change of y; of two, how many times as likely as the other."""
    value = seen.value + change
    return f"{ratio(value)}×" if seen.rivals.compared else percent(probability(value, shared_by(seen)))


def shared_by(seen: Any) -> int:
    """Return 1 for a word, whose probability is that of all its tokens; else the tokens, to show their mean."""
    count = len(seen.again.based[0].target.answer)
    return 1 if count <= WORD and len(seen.answer.split()) < 2 else count


def of_answer(seen: Any, language: Language) -> str:
    """Return the name of the column with the answer's probability."""
    if seen.rivals.compared:
        return f"× {cut(spelled(seen.rivals.other), 8)}"
    return f"p({cut(spelled(seen.answer), 7)})" if shared_by(seen) == 1 else say(language, "why of answer")


def _facts(seen: Any, language: Language, change: float = 0.0) -> dict[str, str]:
    """Collect what sentences need: both answers, how likely the answer is, and how likely after this change of y."""
    before, after = (so_likely(seen, each).rstrip("×") for each in (0.0, change))
    name, one = bare(seen.answer), shared_by(seen) == 1
    answer = f"“{name}”" if cut(name, ANSWER) == name else say(language, "why the answer")
    after = after if one or seen.rivals.compared else say(language, "why each", share=after)
    other = cut(bare(seen.rivals.other), ANSWER)
    return {"before": before, "after": after, "answer": answer, "other": f"“{other}”"}


def _without(seen: Any, language: Language, part: PartEffect) -> str:
    """Write "without “France”": the part that is hidden or replaced, and the strongest part inside a sentence."""
    most = min(inside(seen, part), key=lambda one: one.hidden or 0.0, default=None)
    name = _named(seen, language, part._replace(replaced="") if part.replaced else part)
    if part.replaced:
        return say(language, "why in place", part=name, neutral=spelled(part.replaced))
    if most is not None and (most.hidden or 0.0) < _MUCH * (part.hidden or 0.0):
        return say(language, "why within", part=name, inside=_named(seen, language, most))
    return say(language, "why without it", part=name)


def _carries(seen: Any, language: Language) -> str:
    """Name the head that carries the answer, or say that none does."""
    head, strongest = seen.carrier, seen.strongest
    if head is not None:
        return say(language, "why carries", head=f"{head.layer}.{head.head}")
    return say(
        language, "why any text" if strongest.needed else "why no head", head=f"{strongest.layer}.{strongest.head}"
    )


def _edge(seen: Any, edge: EdgeEffect) -> str:
    """Write an edge, such as is ← France: the query attends to the key."""
    names = parts_of(seen.tokens, seen.text).names
    names += [seen.model.tokenizer.text(token) for token in seen.again.based[0].run.ids[len(names) :]]
    return " ← ".join(bare(names[place]) for place in edge[2:4])
