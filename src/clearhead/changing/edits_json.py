"""Edits as JSON, for files and command lines."""

import json
from typing import Any

from clearhead.changing.edits import MAKERS, Edit, read_edits
from clearhead.errors import DtypeError, FileError, RuleError, check_known, shown, unknown
from clearhead.layers.run import Run


def edits_to_json(edits: Any) -> str:
    """An edit or a list of edits as JSON, which `edits_from_json` reads.

    Raises DtypeError for anything else, RuleError for `like` or `values_like` of a run that is in memory: save it and
    give the path of its file.

    >>> import clearhead as ch
    >>> ch.edits_to_json(ch.cut(queries="on", keys=slice(0, 2), layers=[0]))
    '[{"edit": "cut", "queries": "on", "keys": {"start": 0, "stop": 2}, "layers": [0]}]'
    """
    return json.dumps([_words(edit) for edit in read_edits(edits)], ensure_ascii=False)


def edits_from_json(text: str) -> list[Edit]:
    """The list of edits that `edits_to_json` wrote; it checks what each edit's own function checks.

    Raises FileError where the text is not such JSON, UnknownNameError for an edit that there is not, and what the
    edits' functions raise.

    >>> import clearhead as ch
    >>> ch.edits_from_json('[{"edit": "off", "layers": [1], "heads": [2]}]')
    [off(to='zero', layers=[1], heads=[2])]
    """
    try:
        listed = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(f"edits are not JSON: {error}.") from None
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise FileError(f"edits are {shown(listed)}: expected a list of objects.", '[{"edit": "cut", "keys": 3}]')
    return [_edit(one) for one in listed]


def _edit(words: dict[str, Any]) -> Edit:
    kind, values = words.get("edit"), {name: x for name, x in words.items() if name != "edit"}
    if not isinstance(kind, str) or kind not in MAKERS:
        raise unknown("edit", kind, MAKERS)
    for name in ("queries", "keys"):
        if name in values:
            values[name] = _place_of(values[name])
    try:
        return MAKERS[kind](**values)
    except TypeError as error:
        if isinstance(error, DtypeError):
            raise
        raise FileError(f"{shown(words)} is not an edit: {error}.") from None


def _words(edit: Edit) -> dict[str, Any]:
    """An edit as an object of JSON."""
    if isinstance(edit.seen, Run):
        raise RuleError(
            f"{edit.kind} holds a run that is in memory, and JSON has no room for it.",
            f'seen.save("run.safetensors"), then ch.{edit.kind}("run.safetensors")',
        )
    saved = {"edit": edit.kind, **edit.arguments()}
    return saved | {name: _place_words(saved[name]) for name in ("queries", "keys") if name in saved}


def _place_words(places: Any) -> Any:
    if isinstance(places, tuple):
        return [_place_words(place) for place in places]
    if not isinstance(places, slice):
        return places
    sides = {"start": places.start, "stop": places.stop, "step": places.step}
    return {name: side for name, side in sides.items() if side is not None}


def _place_of(words: Any) -> Any:
    if isinstance(words, list):
        return [_place_of(one) for one in words]
    if isinstance(words, dict):
        check_known("part of a slice", words, ("start", "stop", "step"))
        return slice(words.get("start"), words.get("stop"), words.get("step"))
    return words
