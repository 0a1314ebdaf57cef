"""Prints why an answer follows: the question, the parts of the text, edges and heads, a conclusion."""

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.digits import fixed
from clearhead.explaining import why_words
from clearhead.explaining.explanation import Explanation, Trust
from clearhead.explaining.texts import parts_of
from clearhead.report.cells import colourful, label, note, rgb, table, title
from clearhead.report.console import folded, put, sections
from clearhead.report.explained import about, more_note, split_note
from clearhead.report.streams import shown
from clearhead.tables import Table, bars
from clearhead.words import Language, of_locale, say

_LINES, _BEFORE, _LEAST = 22, 12, 4  # lines of the first screen, of these before the heads, and least for the parts
_PARTS, _HEADS = 5, 4  # the most that this screen shows
_BAR, _NAME = 10, 23
_FOR, _OTHER = (38, 96, 200), (202, 92, 12)  # blue for, orange against: safe for colour-blind readers


def begin(console: Console, seen: Explanation, language: Language, *, whole: bool) -> None:
    """Print what is known so far in the form of `show`: the answer, then, unless `whole`, what hiding each part did."""
    if any(part.hidden is not None for part in seen.parts):
        if not whole:
            console.print()
            put(console, _part_lines(console, seen, language))
    else:
        put(console, _opening(console, seen, language, whole=whole))


def show(
    console: Console,
    seen: Explanation,
    language: Language,
    *,
    whole: bool,
    more: bool,
    trust: Trust | None,
    begun: bool = False,
) -> None:
    """Print the answer on one screen, in sentences, or, with `whole`, in tables of all parts, heads and edges.

    more    end with the options that show more
    begun   `begin` has already printed the answer and the parts
    """
    last = [more_note(seen.carrier or seen.strongest, language)] * more
    if trust is not None:
        score = "–" if trust.score is None else fixed(trust.score, 2, 9)
        last.insert(0, note(say(language, "why trust", masks=trust.masks, score=score)))
    said = [*map(Text, map(shown, why_words.conclusion(seen, language))), *last]
    before = [_opening(console, seen, language, whole=whole)]
    if whole:
        after = [*_tables(console, seen, language), said]
    else:
        before.append(_part_lines(console, seen, language))
        room = _LINES - _height(console, *before, said) - 1
        after = [_fitting(console, partial(why_words.head_lines, seen, language), _HEADS, room), said]
    if begun:
        console.print()
    sections(console, map(iter, after if begun else before + after))


def _part_lines(console: Console, seen: Explanation, language: Language) -> list[Text]:
    room = max(_LEAST, _BEFORE - 1 - _height(console, _opening(console, seen, language, whole=False)))
    return _fitting(console, partial(why_words.part_lines, seen, language), _PARTS, room)


def _fitting(console: Console, sentences: Callable[[int], list[str]], most: int, room: int) -> list[Text]:
    """Return sentences about as many causes as there is room for, at least one."""
    lines: list[Text] = []
    for count in range(most, 0, -1):
        lines = [Text(shown(line)) for line in sentences(count)]
        if _height(console, lines) <= room:
            break
    return lines


def _height(console: Console, *parts: list[Text]) -> int:
    """Count the lines of these parts of a screen, with an empty line between two parts."""
    return sum(len(folded(console, line)) for part in parts for line in part) + len(parts) - 1


def _opening(console: Console, seen: Explanation, language: Language, *, whole: bool) -> list[Text]:
    """Write the text and its answer, or, with `whole`, the question; then other likely tokens, and the model."""
    opening = why_words.question(seen, language) if whole else why_words.answer_line(seen, language, console.width)
    made = [*map(title, why_words.leaks(seen, language)), title(shown(opening))]
    if "\n" in seen.answer.strip() or cell_len(seen.answer) > why_words.ANSWER:
        made += [Text(f"  {shown(line)}") for line in seen.answer.strip().splitlines()]
    made += [Text(shown(why_words.most_likely(seen, language))), *about(seen.model, language, why_words.strange(seen))]
    return made


def _tables(console: Console, seen: Explanation, language: Language) -> Iterator[list[Text]]:
    """Write tables of all listed parts, heads and edges."""
    yield [*_parts(console, seen, language, why_words.parts_table(seen, language, effects=True))]
    for kind, some in (("carried", seen.heads), ("edges", seen.edges)):
        yield [*_causes(console, why_words.causes_table(seen, language, kind, some))]
    yield [note(shown(why_words.gap_of(seen, language)))]


def as_text(seen: Explanation) -> str:
    """Return the screen of a terminal with 80 columns and no colours."""
    console = Console(width=80, file=io.StringIO(), color_system=None, highlight=False, markup=False, emoji=False)
    with console.capture() as printed:
        show(console, seen, of_locale(), whole=False, more=False, trust=None)
    return printed.get().rstrip("\n")


def _parts(console: Console, seen: Explanation, language: Language, listed: Table) -> Iterator[Text]:
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
    """Write a table of heads, each with its strongest edge, or of edges."""
    heading, names, rows, effects, notes = causes
    yield title(shown(heading))
    cells = ([f"  {head}", label(edge, 22), *rest] for head, edge, *rest in rows)
    lines = ([*each, "", drawn] for each, drawn in zip(cells, _bars(console, effects, 8), strict=True))
    yield from table((8, 23, -7, *[-12] * (len(names) - 3), 2, 0), [f"  {names[0]}", *names[1:], "", ""], lines)
    yield from map(note, map(shown, notes))


def _bars(console: Console, effects: Sequence[float], width: int) -> list[Text]:
    """Draw bars: blue for what speaks for the answer, orange for what speaks against it."""
    inks = (Style(color=rgb(_FOR if x > 0 else _OTHER)) if colourful(console) else "" for x in effects)
    return [Text(each.ljust(width), ink) for each, ink in zip(bars(effects, width), inks, strict=True)]
