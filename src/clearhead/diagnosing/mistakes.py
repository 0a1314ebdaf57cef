"""The mistakes that diagnose knows, each a small change of the textbook's recipe with the words for it.

They are data: mistakes.toml has a table for each, and values.toml the words for a recipe's values. What depends on
the inputs, such as the sizes of blocks, is computed in conditions.py and variants.py, by the names that the data use.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from clearhead.diagnosing.conditions import holds
from clearhead.diagnosing.recipe import Change, Diagnosed
from clearhead.diagnosing.variants import COMPUTED
from clearhead.words import Language

Sentence = Mapping[Language, str]  # {field} stands for a changed field of the recipe


@dataclass(frozen=True, eq=False, slots=True)
class Mistake:
    """A mistake that people make."""

    name: str
    changes: tuple[Mapping[str, Any], ...]  # of the recipe; each with the conditions `when` it can be made
    did: Sentence  # what their code did
    mend: Sentence  # the line to change
    needs: Sentence  # what an input must have to show it
    when: tuple[str, ...] = ()  # the conditions under which it can be made
    rule: str = ""  # the caller's rule that it breaks, another condition
    evidence: Literal["numbers", "rounding", "chance"] = "numbers"  # it gives theirs exactly, but for rounding; by luck
    alone: bool = False  # never tried together with another mistake
    seldom: bool = False  # never tried together with another seldom one
    rare: bool = False  # tried alone and last

    def variants(self, inputs: Diagnosed, *, rare: bool = False) -> list[Change]:
        """The changes that these inputs allow: the usual ones, or the rare ones, which are tried alone and last."""
        if not all(holds(condition, inputs) for condition in (*self.when, *([self.rule] if self.rule else []))):
            return []
        result: list[Change] = []
        for change in self.changes:
            fields = {field: value for field, value in change.items() if field != "when"}
            computed = next((field for field in fields if field in COMPUTED), None)
            if "when" in change and not holds(change["when"], inputs):
                continue
            if computed is not None:
                variants = COMPUTED[computed](inputs, fields.pop(computed))
                result += [{**fields, **variant} for variant in (variants.rare if rare else variants.usual)]
            elif rare == self.rare:
                result.append(fields)
        return result


@cache
def mistakes() -> tuple[Mistake, ...]:
    """The catalogue, in the order in which mistakes are tried."""
    tables = _read("mistakes.toml")
    return tuple(_mistake(name, dict(table), tables) for name, table in tables.items())


@cache
def values() -> dict[str, dict[str, Sentence]]:
    """What the values of a recipe's fields mean: the words by field and value."""
    return _read("values.toml")


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(files("clearhead.diagnosing").joinpath(name).read_text(encoding="utf-8"))


def _mistake(name: str, table: dict[str, Any], tables: dict[str, Any]) -> Mistake:
    when = table.pop("when", ())
    for what in ("did", "mend", "needs"):
        sentence = table[what]
        if isinstance(sentence, dict) and "as" in sentence:  # the same as another mistake's
            sentence = tables[sentence["as"]][what]
        table[what] = {"en": sentence, "zh": sentence} if isinstance(sentence, str) else sentence
    table["changes"] = tuple({field: _value(x) for field, x in change.items()} for change in table["changes"])
    return Mistake(name, when=(when,) if isinstance(when, str) else tuple(when), **table)


def _value(value: Any) -> Any:
    """A value as the recipe holds it: TOML has no tuples, and no None for a number that is fitted to theirs."""
    if value == "fitted":
        return None
    return tuple(value) if isinstance(value, list) else value
