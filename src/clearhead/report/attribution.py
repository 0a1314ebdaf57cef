"""Prints the way to a logit: the residual stream as a line, and beside it what reads it and what is added to it."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from clearhead.digits import fixed, signed
from clearhead.explaining.attribution import Way, WayPart, against, experts_of, norm_name, notes, part_name
from clearhead.explaining.head_steps import HeadSteps
from clearhead.explaining.texts import token_name
from clearhead.report.cells import columns, label, note, title
from clearhead.report.console import put
from clearhead.report.streams import spelled
from clearhead.words import Language, say

_MOST_LAYERS = 4  # if there are more, each layer is one line
_WIDTHS = (50, -8, -9, -13)  # columns: a part's name, what it adds, the sum so far, what it adds to the difference


def show(console: Console, seen: HeadSteps, language: Language) -> None:
    """Print the way to the likeliest next token, and its difference from the second; or one line if there is no way."""
    console.print()
    way = _lines(seen.ways[:2], token_name(seen, seen.token), language)
    put(console, way if seen.ways else [note(say(language, "no way"))])


def _lines(ways: Sequence[Way], token: str, language: Language) -> Iterator[Text]:
    way, other = ways[0], ways[1] if len(ways) > 1 else None
    yield title(say(language, "way", next=spelled(way.text), token=token))
    heads = ["", say(language, "way adds"), say(language, "way sums")]
    if other:
        heads.append(say(language, "way minus", token=label(spelled(other.text), 6).rstrip()))
    yield columns(_WIDTHS, heads, "dim")
    tokens, d_model = way.shape
    yield note(f"  {say(language, 'way stream', tokens=tokens, d_model=d_model, token=token)}")
    leads = [part.adds for part in against(way, other).parts] if other else [None] * len(way.parts)
    rows = list(zip(way.parts, way.sums, leads, strict=True))
    short = len({part.layer for part in way.parts} - {None}) > _MOST_LAYERS
    for layer, group in groupby(rows, lambda row: row[0].layer):
        if layer is not None and short:
            parts = list(group)
            yield _layer_in_one(parts, language)
            yield from (note(f"  ┃    {experts}") for part, *_ in parts if (experts := experts_of(part, language)))
            continue
        if layer is not None:
            yield Text(f"  ┃ {say(language, 'way layer', layer=layer)}")
        for part, total, lead in group:
            if layer is not None and part.read is not None:
                yield _row(f"┃→ {norm_name(part.read, d_model, language)}", 0.0)
            mark = "▼ " if part.kind in ("norm", "unembedding") else "┃←"
            yield _row(f"{mark} {part_name(part, d_model, language)}", part.adds, total, lead)
            if part.wrote is not None:
                yield _row(f"┃    → {norm_name(part.wrote, d_model, language)}", 0.0)
            if below := _most(part, language) if part.heads else experts_of(part, language):
                yield note(f"  ┃    {below}")
    last = ["  = " + say(language, "way logit", next=spelled(way.text)), "", fixed(way.logit, 2, 8)]
    yield columns(_WIDTHS, [*last, signed(way.logit - other.logit)] if other else last, "bold")
    yield from map(note, [*notes(way, language), *([say(language, "way constant")] if other else [])])


def _row(lead: str, adds: float, total: float | None = None, difference: float | None = None) -> Text:
    cells = [f"  {lead}", signed(adds), "" if total is None else fixed(total, 2, 8)]
    return columns(_WIDTHS, cells if difference is None else [*cells, signed(difference)])


def _layer_in_one(rows: Sequence[tuple[WayPart, float, float | None]], language: Language) -> Text:
    """Write a whole layer in one line: what each of its parts adds, and their sums."""
    names = {"attention": say(language, "way attention alone"), "mlp": "MLP", "input": say(language, "way input alone")}
    inside = ", ".join(f"{names[part.kind]} {signed(part.adds)}" for part, _, _ in rows)
    leads = [lead for _, _, lead in rows if lead is not None]
    name = f"┃← {say(language, 'way layer', layer=rows[0][0].layer)}: {inside}"
    return _row(name, sum(part.adds for part, _, _ in rows), rows[-1][1], sum(leads) if leads else None)


def _most(part: WayPart, language: Language) -> str:
    """Name the heads that add or take most."""
    first, *more = sorted(range(len(part.heads)), key=lambda head: -abs(part.heads[head]))[:2]
    facts = {"first": first, "adds": signed(part.heads[first])}
    if not more:
        return say(language, "way most one", **facts)
    return say(language, "way most", **facts, second=more[0], more=signed(part.heads[more[0]]))
