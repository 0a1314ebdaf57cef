"""What `explain` opens with: the text shaded by what the chosen token attends to, what follows it, what heads do."""

from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.text import Text

from clearhead.digits import percent
from clearhead.explaining.answer import CaptionedHead, clearest
from clearhead.explaining.explanation import Explanation
from clearhead.explaining.texts import parts_of
from clearhead.report.console import title
from clearhead.report.heat import bar, label
from clearhead.report.shaded import shaded_text
from clearhead.report.streams import spelled
from clearhead.words import Language, say


def lines(console: Console, seen: Explanation, language: Language) -> Iterator[Text]:
    """All of it."""
    if seen.window is not None:
        yield title(say(language, "window", **seen.window._asdict(), last=seen.window.stop - 1))
    yield from _attending(console, seen, language)
    yield from _next(seen, language)
    yield from _heads(seen, language)


def _attending(console: Console, seen: Explanation, language: Language) -> Iterator[Text]:
    weights, masked = seen.row.weights, np.isneginf(seen.row.masked)
    place = {"layer": seen.layer, "head": seen.head, "token": _name(seen, seen.token)}
    if masked.all():
        yield title(say(language, "attends to nothing", **place))
    else:
        key = int(np.where(masked, -1.0, weights).argmax())
        facts = {"most": _name(seen, key), "share": percent(float(weights[key]))}
        yield title(say(language, "attends most to itself" if key == seen.token else "attends most", **place, **facts))
    if "sinks" in seen.run.rules:
        yield Text(say(language, "sink takes", share=percent(max(0.0, 1 - float(weights.sum())))), style="dim")
    yield Text()
    yield from shaded_text(console, seen.text, seen.tokens, (weights, masked, seen.token), language)


def _next(seen: Explanation, language: Language) -> Iterator[Text]:
    if not seen.after:
        return
    yield Text()
    last = seen.token == len(seen.tokens) - 1
    yield title(say(language, "next" if last else "next after", token=_name(seen, seen.token)))
    for choice in seen.after:
        drawn = bar(choice.probability, 24)
        line = f"  {label(spelled(choice.text), 12)} {percent(choice.probability):>7}  {drawn}"
        yield Text(line.rstrip())


def _heads(seen: Explanation, language: Language) -> Iterator[Text]:
    heads = seen.heads()
    own = next(head for head in heads if (head.layer, head.head) == (seen.layer, seen.head))
    found = clearest(heads)
    if own.caption is None:
        return
    yield Text()
    yield title(say(language, "what heads do"))
    yield _caption(own, next((more for head, more in found if head is own), 0), language)
    for head, more in found:
        if head is not own:
            yield _caption(head, more, language)


def _caption(head: CaptionedHead, more: int, language: Language) -> Text:
    assert head.caption is not None
    said = head.caption.said[language]
    line = Text("  " + say(language, "head caption", layer=head.layer, head=head.head, caption=said))
    if more:
        line.append(say(language, "more such heads", count=more), style="dim")
    return line


def _name(seen: Explanation, token: int) -> str:
    return f"{token} {spelled(parts_of(seen.tokens, seen.text).names[token])}"
