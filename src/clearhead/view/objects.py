"""What notebooks show of plans, strongest edges and matrices of effects: small tables, in the locale's language."""

from collections.abc import Iterable
from functools import singledispatch
from typing import Any

from clearhead.core.arrays import as_host_array
from clearhead.core.statistics import Strongest
from clearhead.digits import significant
from clearhead.engines import Plan
from clearhead.ops.causes import EffectMatrix
from clearhead.tables import QUICK, Table, html
from clearhead.words import Language, of_locale, say


def html_of(shown: Any) -> str:
    """The tables of an object as HTML."""
    language = of_locale()
    return html(language, tables(shown, language))


@singledispatch
def tables(shown: Any, language: Language) -> Iterable[Table]:
    """The tables of an object."""
    raise TypeError(shown, language)


@tables.register
def _(shown: Plan, language: Language) -> Iterable[Table]:
    rows = [(name, reason) for name, reasons in shown.reasons.items() for reason in reasons]
    rows.append((shown.engine, say(language, "plan takes")))
    columns = [say(language, f"column {name}") for name in ("engine", "reason")]
    heading = say(language, "plan table", engine=shown.engine)
    return [Table(heading, columns, rows, notes=[shown.experimental] if shown.experimental else [])]


@tables.register
def _(shown: Strongest, language: Language) -> Iterable[Table]:
    return [_strongest(shown, say(language, "strongest table"), language)]


@tables.register
def _(shown: EffectMatrix, language: Language) -> Iterable[Table]:
    heading = say(language, f"{shown.kind} table")
    if 0 < shown.size <= QUICK:
        return [_strongest(shown.strongest(10), heading, language)._replace(notes=[repr(shown)])]
    more = [say(language, "too many", hint="E.strongest(10)")] if shown.size else []
    return [Table(heading, notes=[repr(shown), *more])]


def _strongest(edges: Strongest, heading: str, language: Language) -> Table:
    """A row for each edge."""
    columns = [as_host_array(x, name)[0].tolist() for name, x in edges._asdict().items()]
    rows = [(*map(str, edge), significant(value, 4)) for *edge, value in zip(*columns, strict=True)]
    names = [say(language, f"column {name}") for name in edges._fields]
    return Table(heading, names, rows, [-value for value in columns[-1]])
