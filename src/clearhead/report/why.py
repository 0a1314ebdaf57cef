"""Why an answer, in the terminal: the question, the parts of the text, edges and heads, a conclusion, both ways."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.digits import fixed
from clearhead.explaining import why_words
from clearhead.explaining.texts import parts_of
from clearhead.explaining.why import Why
from clearhead.explaining.why_lists import Trust
from clearhead.report.cells import colourful, label, note, rgb, table, title
from clearhead.report.console import folded, sections
from clearhead.report.explained import about, more_note, split_note
from clearhead.report.streams import printable, shown
from clearhead.tables import Table, bars
from clearhead.words import Language, say

_LINES = 25  # of the first screen
_COUNTS = ((6, 5), (6, 4), (5, 4), (5, 3), (4, 3), (3, 3), (2, 2), (1, 1))  # parts and heads on it: the most that fit
_ANSWER = 60  # columns of the answer
_BAR, _NAME = 10, 23
_FOR, _OTHER = (38, 96, 200), (202, 92, 12)  # blue speaks for the answer, orange against it: all eyes tell them apart


def show(console: Console, seen: Why, language: Language, *, whole: bool, more: bool, trust: Trust | None) -> None:
    """Print the answer on one screen, or with `whole` all parts, heads and edges that were listed.

    more   end with the options that show more
    """
    last = [more_note(seen.carrier or seen.strongest, language)] * more
    if trust is not None:
        score = "–" if trust.score is None else fixed(trust.score, 2, 9)
        last.insert(0, note(say(language, "why trust", masks=trust.masks, score=score)))
    said = [Text(shown(sentence)) for sentence in why_words.conclusion(seen, language)]
    said += [note(shown(why_words.gap_of(seen, language)))] * whole
    for parts, heads in [(None, None)] if whole else _COUNTS:
        asked = why_words.question(seen, language, None if whole else _ANSWER)
        opening = [
            title(shown(asked)),
            Text(shown(why_words.most_likely(seen, language))),
            *about(seen.model, language),
        ]
        opening += [Text(f"{say(language, 'edits')}  {printable(repr(edit))}") for edit in seen.edits]
        listed = why_words.parts_table(seen, language, parts, effects=whole)
        screen = [opening, [*_parts(console, seen, language, listed)]]
        for kind, some in (("carried", seen.heads[:heads]), ("edges", seen.edges))[: 1 + whole]:
            screen.append([*_causes(console, why_words.causes_table(seen, language, kind, some))])
        screen.append([*said, *last])
        if sum(len(folded(console, line)) for part in screen for line in part) + len(screen) - 1 <= _LINES:
            break
    sections(console, map(iter, screen))


def _parts(console: Console, seen: Why, language: Language, listed: Table) -> Iterator[Text]:
    heading, names, rows, effects, notes = listed
    yield title(heading)
    wide = any(cell_len(shown(row[0])) > _NAME for row in rows)  # then there is no room for bars
    size = 0 if wide else _BAR + 2
    name = _NAME + _BAR + 2 - size
    drawn = [""] * len(rows) if wide else _bars(console, effects, _BAR)
    cells = ([f"  {label(part, name)}", each, *rest] for (part, *rest), each in zip(rows, drawn, strict=True))
    lines = ([*each[:-1], f"  {each[-1]}"] for each in cells)
    middle = [-9] * (len(names) - 3)
    heads = [f"  {names[0]}", "", *names[1:-1], f"  {names[-1]}"]
    yield from table((name + 3, -size, *middle, -12, 0), heads, lines)
    yield from map(note, map(shown, notes))
    yield from split_note(parts_of(seen.tokens, seen.text).split, language)


def _causes(console: Console, causes: Table) -> Iterator[Text]:
    """Heads, each with its strongest edge, or edges."""
    heading, names, rows, effects, notes = causes
    yield title(shown(heading))
    cells = ([f"  {head}", label(edge, 22), *rest] for head, edge, *rest in rows)
    lines = ([*each, "", drawn] for each, drawn in zip(cells, _bars(console, effects, 8), strict=True))
    yield from table((8, 23, -7, *[-12] * (len(names) - 3), 2, 0), [f"  {names[0]}", *names[1:], "", ""], lines)
    yield from map(note, map(shown, notes))


def _bars(console: Console, effects: Sequence[float], width: int) -> list[Text]:
    """Blue for what speaks for the answer, orange for what speaks against it."""
    inks = (Style(color=rgb(_FOR if x > 0 else _OTHER)) if colourful(console) else "" for x in effects)
    return [Text(each.ljust(width), ink) for each, ink in zip(bars(effects, width), inks, strict=True)]
