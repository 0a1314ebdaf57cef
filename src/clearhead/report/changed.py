"""Prints how edits of a model's attention change its next token: a run without the edits, and a run with them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from clearhead.changing.edits import Edit, change
from clearhead.digits import percent, signed
from clearhead.errors import RuleError
from clearhead.explaining.rerun import forward_pass
from clearhead.models.protocol import Each, LanguageModel, probabilities
from clearhead.models.tokenizer import Reading
from clearhead.report.cells import columns, listed, title
from clearhead.report.console import sections
from clearhead.report.explained import opening
from clearhead.report.streams import printable
from clearhead.words import Language, say

_SHOWN, _EACH = 8, 5  # next tokens on the screen; candidates of each kind


def moved(model: LanguageModel, reading: Reading, edits: Sequence[Edit], each: Each) -> list[dict[str, Any]]:
    """Return next tokens with their probabilities without and with the edits, those that moved most first.

    They are the likeliest tokens of both runs and those that moved most. Raises as `change`, and RuleError for a model
    that predicts no next token.
    """
    runs = [forward_pass(model, reading.tokens, each)]
    if runs[0].logits is None:
        what = f"{model.name} predicts no next token that edits could change."
        raise RuleError(what, "in Python, `with ch.change(model, edits), ch.watch(model) as seen:` shows attention.")
    with change(model, list(edits)):
        runs.append(forward_pass(model, reading.tokens, each))
    shares = [probabilities(run.logits[-1]) for run in runs]
    change_of = np.abs(shares[1] - shares[0])
    orders = [np.argsort(-x, kind="stable")[:_EACH] for x in (*shares, change_of)]
    chosen = sorted({int(i) for order in orders for i in order}, key=lambda i: (-change_of[i], i))
    before, after = ([float(each[i]) for i in chosen] for each in shares)
    texts = map(model.tokenizer.text, chosen)
    rows = zip(chosen, texts, before, after, strict=True)
    return [dict(zip(("id", "text", "before", "after"), row, strict=True)) for row in rows]


def show(
    console: Console,
    model: LanguageModel,
    reading: Reading,
    edits: Sequence[Edit],
    tokens: Sequence[dict[str, Any]],
    language: Language,
) -> None:
    """Print the model, the text, the edits, and the tokens that `moved` returned."""
    sections(console, [_opening(console, model, reading, edits, language), _next(tokens, language)])


def _opening(
    console: Console, model: LanguageModel, reading: Reading, edits: Sequence[Edit], language: Language
) -> Iterator[Text]:
    yield from opening(console, model, reading, language)
    width, name = cell_len(say(language, "tokens")) + 2, say(language, "edits")
    for place, edit in enumerate(edits):
        yield columns((width, 0), ["" if place else name, printable(repr(edit))])


def _next(tokens: Sequence[dict[str, Any]], language: Language) -> Iterator[Text]:
    yield title(say(language, "moved next"))
    widths = (14, -11, -11, -17)
    yield columns(widths, ["", *(say(language, key) for key in ("before", "after", "points"))], "dim")
    for token in tokens[:_SHOWN]:
        before, after = token["before"], token["after"]
        cells = percent(before), percent(after), signed(100 * (after - before))
        yield columns(widths, [f"  {listed(token['text'])}", *cells])
