"""The way to a logit in the terminal: the residual stream as a line, with all that reads it and is added to it."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from clearhead.digits import fixed
from clearhead.explaining.explanation import Explanation
from clearhead.explaining.stream import NoWay
from clearhead.explaining.texts import parts_of
from clearhead.explaining.way import Way, WayPart, against
from clearhead.explaining.way_told import norm_name, notes, part_name
from clearhead.report.console import put, title
from clearhead.report.explained import fill
from clearhead.report.heat import label
from clearhead.report.streams import spelled
from clearhead.words import Language, say

_MOST_LAYERS = 4  # of more than these, each is one line
_WIDTH = 50  # of what a part is called; the columns of numbers follow


def show(console: Console, seen: Explanation, language: Language) -> None:
    """Print the way to the likeliest next token and its difference from the next, after an empty line."""
    names = parts_of(seen.tokens, seen.text).names
    show_ways(console, seen.ways[:2], f"{seen.token} {spelled(names[seen.token])}", language, seen.no_way)


def show_ways(
    console: Console, ways: Sequence[Way], token: str, language: Language, no_way: NoWay | None = None
) -> None:
    """Print one way, and its difference from the second; in one line why there is none."""
    lines = list(_lines(ways, token, language)) if ways else []
    if no_way is not None:
        lines = [Text(no_way.said(language), style="dim")]
    for place, line in enumerate(lines):
        if place == 0:
            console.print()
        put(console, line)


def _lines(ways: Sequence[Way], token: str, language: Language) -> Iterator[Text]:
    found, other = ways[0], ways[1] if len(ways) > 1 else None
    less = against(found, other).parts if other else []
    yield title(say(language, "way", next=spelled(found.text), token=token))
    heads = [say(language, "way adds"), say(language, "way sums")]
    heads += [say(language, "way minus", token=label(spelled(other.text), 7).rstrip())] if other else []
    columns = "".join(fill(head, width, right=True) for head, width in zip(heads, (8, 9, 13), strict=False))
    yield Text(f"{fill('', _WIDTH)}{columns}", style="dim")
    tokens, d_model = found.shape
    yield Text(f"  {say(language, 'way stream', tokens=tokens, d_model=d_model, token=token)}", style="dim")

    def row(lead: str, adds: float, sums: float | None, minus: float | None) -> Text:
        figures = f"{_signed(adds):>8}{'' if sums is None else fixed(sums, 2, 8):>9}"
        return Text(f"{fill(f'  {lead}', _WIDTH)}{figures}{'' if minus is None else _signed(minus):>13}".rstrip())

    places = list(range(len(found.parts)))
    sums, layers = found.sums, len({part.layer for part in found.parts} - {None})
    for layer, group in groupby(places, lambda place: found.parts[place].layer):
        at = list(group)
        minus = [less[place].adds if other else None for place in at]
        if layer is not None and layers > _MOST_LAYERS:
            inside = ", ".join(_brief(found.parts[place], language) for place in at)
            total = sum(found.parts[place].adds for place in at)
            whole = sum(x for x in minus if x is not None) if other else None
            yield row(f"┃← {say(language, 'way layer', layer=layer)}: {inside}", total, sums[at[-1]], whole)
            continue
        if layer is not None:
            yield Text(f"  ┃ {say(language, 'way layer', layer=layer)}")
        for place, lead in zip(at, minus, strict=True):
            part = found.parts[place]
            if layer is not None and part.read is not None:
                yield row(f"┃→ {norm_name(part.read, d_model, language)}", 0.0, None, None)
            mark = "▼ " if part.kind in ("norm", "unembedding") else "┃←"
            yield row(f"{mark} {part_name(part, d_model, language)}", part.adds, sums[place], lead)
            if part.wrote is not None:
                yield row(f"┃    → {norm_name(part.wrote, d_model, language)}", 0.0, None, None)
            if most := _most(part, language):
                yield Text(f"  ┃    {most}", style="dim")
    logit = say(language, "way logit", next=spelled(found.text))
    last = f"{fill(f'  = {logit}', _WIDTH + 8)}{fixed(found.logit, 2, 8):>9}"
    yield Text(last + (_signed(found.logit - other.logit).rjust(13) if other else ""), style="bold")
    for note in [*notes(found, language), *([say(language, "way constant")] if other else [])]:
        yield Text(note, style="dim")


def _most(part: WayPart, language: Language) -> str:
    """The heads of an attention that add or take most."""
    order = sorted(range(len(part.heads)), key=lambda head: -abs(part.heads[head]))[:2]
    if not order:
        return ""
    named = {"first": order[0], "adds": _signed(part.heads[order[0]])}
    if len(order) == 1:
        return say(language, "way most one", **named)
    return say(language, "way most", **named, second=order[1], more=_signed(part.heads[order[1]]))


def _brief(part: WayPart, language: Language) -> str:
    return f"{'MLP' if part.kind == 'mlp' else say(language, 'way attention alone')} {_signed(part.adds)}"


def _signed(number: float) -> str:
    return ("+" if number > 0 else "") + fixed(number, 2, 8)
