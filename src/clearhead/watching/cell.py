"""What a notebook's cell shows of a watched run: the edges and heads that did most, else the sharpest heads."""

from contextlib import suppress
from typing import Any

from clearhead.errors import RuleError
from clearhead.tables import QUICK, Table, html
from clearhead.watching.effects import HeadEffects, table_of
from clearhead.watching.summary import Summary
from clearhead.words import of_locale, say

_EDGES, _HEADS = 10, 8


def cell(seen: Any) -> str:
    """A few kB of HTML, at any length of the text."""
    language = of_locale()
    first, *lines = (line.strip() for line in repr(seen).splitlines())
    layers = [seen.layer(name) for name in seen.layers]
    tables = [Table(first, notes=lines)]
    if sum(len(x.heads) * x.observation.queries * x.observation.keys for x in layers) > QUICK:
        tables.append(Table("", notes=[say(language, "too many", hint=".summary(), .strongest(20), .heads()")]))
    elif layers:
        with suppress(RuleError):  # there are no causes, or no backward pass has run
            heads = sorted(seen.heads(), key=lambda head: -abs(head.off))[:_HEADS]
            tables += [table_of(x, language) for x in (seen.strongest(_EDGES), HeadEffects(heads))]
        if len(tables) == 1:
            sharpest = sorted(seen.summary(), key=lambda head: (head.sink > 0.5, head.entropy))[:_HEADS]
            tables.append(table_of(Summary(sharpest), language))
    if any(layer.q is not None for layer in layers):
        tables.append(Table("", notes=[say(language, "whole page")]))
    return html(language, tables)
