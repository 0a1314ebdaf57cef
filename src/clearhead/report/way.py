"""The way from a text to one logit in the terminal: a line for each part of the model."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from clearhead.digits import fixed
from clearhead.explaining.explanation import Explanation
from clearhead.explaining.gpt2 import Model
from clearhead.explaining.texts import parts_of
from clearhead.explaining.way import WayPart
from clearhead.explaining.way_told import names, notes
from clearhead.report.console import put, title
from clearhead.report.explained import fill
from clearhead.report.streams import spelled
from clearhead.words import Language, say


def show(console: Console, seen: Explanation, language: Language) -> None:
    """Print it after an empty line; nothing for models whose parts are not known."""
    for place, line in enumerate(_lines(seen, language)):
        if place == 0:
            console.print()
        put(console, line)


def _lines(seen: Explanation, language: Language) -> Iterator[Text]:
    found = seen.way
    if found is None or not isinstance(seen.model, Model):
        return
    config = seen.model.config
    token = f"{found.position} {spelled(parts_of(seen.tokens, seen.text).names[found.position])}"
    yield title(say(language, "way", next=spelled(found.text), token=token))
    known = ""
    for part in found.parts:
        place, what = names(part, config, language)
        line = f"  {fill('' if place == known else place, 12)}{fill(what, 27)}{_signed(part.adds):>8}"
        yield Text(f"{line}   {_most(part, language)}".rstrip())
        known = place
    total = say(language, "way sum", vocabulary=f"{config.vocabulary:,}")
    yield Text(f"  {fill('', 39)}{fixed(found.logit, 2, 8):>8}   {total}", style="bold")
    for note in notes(found, language):
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


def _signed(number: float) -> str:
    return ("+" if number >= 0 else "") + fixed(number, 2, 8)
