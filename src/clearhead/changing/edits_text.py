"""Reads edits from the command line: on>sat@0.3 cuts the key `sat` for the query `on` in layer 0, head 3."""

import re
from collections.abc import Iterable
from typing import Any

from clearhead.changing.edits import Edit, boost, cut, off
from clearhead.core.effects import Rest
from clearhead.errors import ClearheadError, RuleError, shown

_WHERE = re.compile(r"(\d*)(?:\.(\d+))?")
_HINT = {
    "cut": '--cut "on>sat" hides the key sat from the query on; "on>sat@0.3" only in head 3 of layer 0.',
    "boost": '--boost "sat=2" adds 2 to the logits of the key sat; "on>sat=2@0.3" for one query in head 3 of layer 0.',
    "off": "--off 0.3 is head 3 of layer 0; 0.3,1.2 two heads; 0 a whole layer; .3 head 3 of every layer.",
}
_SIGNS = {"cut": "QUERIES>KEYS", "boost": "KEYS=NUMBER", "off": "LAYER.HEAD"}


def edits_from_options(
    options: Iterable[tuple[str, str]], layer: int | None, head: int | None, rest: Rest = "renormalise"
) -> list[Edit]:
    """Read edits from pairs of an option and its text: ("cut", "on>sat@0.3"), ("boost", "sat=2"), ("off", "0.3").

    layer, head   where an edit without @ acts; None is every layer, or every head
    rest          where the weights of cuts go, as in ch.cut
    Raises RuleError for a text of another form, and as ch.cut, ch.boost and ch.off.

    >>> edits_from_options([("cut", "on>sat@0.3"), ("boost", "sat,0:2=2"), ("off", "0.3,1.2")], None, None)
    ... # doctest: +NORMALIZE_WHITESPACE
    [cut(queries='on', keys='sat', layers=[0], heads=[3]),
     boost(keys=['sat', slice(0, 2)], by=2.0),
     off(to='zero', layers=[0], heads=[3]),
     off(to='zero', layers=[1], heads=[2])]
    """
    return [edit for kind, text in options for edit in _edits(kind, text, layer, head, rest)]


def _edits(kind: str, text: str, layer: int | None, head: int | None, rest: Rest) -> list[Edit]:
    """Read one option: an edit for each place that it names."""
    places = [_at(layer, head)]
    try:
        if kind == "off":
            places = _where(kind, text) if text.strip() else places
            if places == [{"layers": None, "heads": None}]:
                raise RuleError("it names neither a layer nor a head, and would switch every head off.")
            return [off(**place) for place in places]
        what, sign, where = text.rpartition("@")
        places = _where(kind, where) if sign else places
        what = what if sign else text
        if kind == "boost":
            what, _, number = what.rpartition("=")
            try:
                by = float(number)
            except ValueError:
                raise _form("boost") from None
            queries, _, keys = what.rpartition(">")
            return [boost(queries=_places(queries), keys=_places(keys), by=by, **place) for place in places]
        queries, sign, keys = what.partition(">")
        if not sign:
            raise _form(kind)
        return [cut(queries=_places(queries), keys=_places(keys), rest=rest, **place) for place in places]
    except ClearheadError as error:
        raise type(error)(f"--{kind} {shown(text)}: {error.what}", _HINT[kind]) from None


def _form(kind: str) -> RuleError:
    return RuleError(f"expected {_SIGNS[kind]}.")


def _places(text: str) -> Any:
    """Read positions, ranges such as 0:3, and words, separated by commas; None for an empty text."""
    places: list[Any] = []
    for part in (part.strip() for part in text.split(",")):
        sides = re.fullmatch(r"(-?\d{1,9})?:(-?\d{1,9})?", part)
        if sides:
            places.append(slice(*(None if side is None else int(side) for side in sides.groups())))
        elif part:
            places.append(int(part) if re.fullmatch(r"-?\d{1,9}", part) else part)
    return None if not places else places[0] if len(places) == 1 else places


def _where(kind: str, text: str) -> list[dict[str, Any]]:
    """Read layers and heads, separated by commas: 0 (a layer), 0.3 (one of its heads) or .3 (a head of every layer)."""
    matches = [_WHERE.fullmatch(part.strip()) for part in text.split(",")]
    if not all(match is not None and match[0] for match in matches):
        raise _form(kind) if kind == "off" else RuleError("expected LAYER.HEAD after @.")
    return [_at(match[1], match[2]) for match in matches if match is not None]


def _at(layer: int | str | None, head: int | str | None) -> dict[str, Any]:
    numbers = {"layers": layer, "heads": head}
    return {name: None if number in (None, "") else [int(number)] for name, number in numbers.items()}
