"""The catalogue of mistakes, each a small change of the textbook's recipe with the sentences for it.

They are data: mistakes.toml has a table for each, and values.toml the words for a recipe's values. The parts that
depend on the inputs are computed here, by the names that the data use: conditions under which a mistake is possible,
and changes with other scales, block sizes, narrower dtypes or subsets of matrices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from math import prod
from typing import Any, Literal

import numpy as np

from clearhead.core.arrays import unrepeated
from clearhead.core.files import toml_of
from clearhead.core.rules import RULES
from clearhead.diagnosing.changes import MASKS
from clearhead.diagnosing.recipe import Change, Diagnosed
from clearhead.words import Language

BLOCKS = (2, 4, 8, 16, 32, 64, 128)  # the usual sizes, and those of short inputs
Sentence = Mapping[Language, str]  # {field} stands for a changed field of the recipe
_ANY: Sentence = {"en": "other random numbers, and sizes that all differ", "zh": "换一组随机数，且各维大小互不相同"}


@dataclass(frozen=True, eq=False, slots=True)
class Mistake:
    """A mistake that people make."""

    name: str
    changes: tuple[Change, ...]  # each may have its own condition under `when`
    did: Sentence  # what their code did
    mend: Sentence  # the line to change
    needs: Sentence  # what an input must have to show it
    when: Sequence[str] = ()  # the conditions under which it can be made
    # How it shows: in the numbers, only in a size (how many keys or queries come first or last), or only in rounding.
    evidence: Literal["numbers", "a size", "rounding"] = "numbers"
    seldom: bool = False  # never tried together with another seldom one

    def variants(self, inputs: Diagnosed) -> list[Change]:
        """The changes that these inputs allow."""
        if not all(CONDITIONS[name](inputs) for name in self.when):
            return []
        result: list[Change] = []
        for change in (c for c in self.changes if "when" not in c or CONDITIONS[c["when"]](inputs)):
            fields = {field: value for field, value in change.items() if field != "when"}
            computed = next((field for field in fields if field in COMPUTED), None)
            variants = [{}] if computed is None else COMPUTED[computed](inputs, fields.pop(computed))
            result += [{**fields, **variant} for variant in variants]
        return result


@cache
def mistakes() -> tuple[Mistake, ...]:
    """The catalogue, in the order in which mistakes are tried."""
    tables = toml_of("clearhead.diagnosing", "mistakes.toml")
    needs, by_name = tables.pop("needs"), {**tables["common"], **tables["seldom"]}
    return tuple(_mistake(name, dict(by_name[name]), by_name, needs, kind) for kind in tables for name in tables[kind])


@cache
def values() -> dict[str, dict[str, Any]]:
    """The words for the values of a recipe's fields, by field and value."""
    return toml_of("clearhead.diagnosing", "values.toml")


def _mistake(name: str, table: dict[str, Any], tables: dict[str, Any], needs: dict[str, str], kind: str) -> Mistake:
    for what in ("did", "mend"):
        sentence = table[what]
        if isinstance(sentence, dict) and "as" in sentence:  # the same as another mistake's
            sentence = tables[sentence["as"]][what]
        table[what] = {"en": sentence, "zh": sentence} if isinstance(sentence, str) else sentence
    table["needs"] = {"en": table["needs"], "zh": needs[table["needs"]]} if "needs" in table else _ANY
    table["changes"] = tuple(  # TOML has no tuples, and no None, which stands for a number solved from theirs
        {field: None if x == "solved" else tuple(x) if isinstance(x, list) else x for field, x in change.items()}
        for change in table["changes"]
    )
    return Mistake(name, seldom=kind == "seldom", **table)


def _hides(inputs: Diagnosed) -> bool:
    """Does a rule, a bias or a table of spans hide keys from queries?"""
    p = inputs.problem
    scored = [unrepeated(x) for x in (p.bias, p.span_table) if x is not None]
    ruled = any(p.uses(rule) for names in MASKS for rule in names if rule != "query_lengths")
    return ruled or any(bool(np.isneginf(x).any()) for x in scored)


# A mistake is tried only if its conditions hold; else it would equal another mistake, take long, or make no sense. A
# mistake that shapes rule out raises ValueError or IndexError; one that changes no number, or only steps after theirs,
# explains nothing.
CONDITIONS: dict[str, Callable[[Diagnosed], bool]] = {  # a rule's name means that the rule is in use
    **{rule: lambda x, rule=rule: x.problem.uses(rule) for rule in RULES},  # type: ignore[misc]
    "several heads": lambda x: x.problem.heads > 1,
    "several entries": lambda x: x.problem.batch > 1,
    "several matrices": lambda x: x.problem.heads * x.problem.batch > 1,
    "few weights": lambda x: prod(x.problem.shape) <= 2**21,
    "positions": lambda x: x.problem.uses("causal") or x.problem.uses("window"),
    "several corners": lambda x: x.problem.queries != x.problem.keys or bool(x.problem.query_offset.any()),
    "groups": lambda x: x.problem.kv_heads not in (1, x.problem.heads),
    "hidden keys": _hides,
    "later keys in the window": lambda x: x.problem.window[1] is None or x.problem.window[1] > 0,
    "right side above 0": lambda x: bool(x.problem.window[1]),
    "bounded to the right": lambda x: x.problem.window[1] is not None,
    "heads no power of two": lambda x: x.problem.heads & (x.problem.heads - 1) != 0,
    "rotary": lambda x: x.rotary is not None,
    "layer": lambda x: x.layer is not None,
    "W^O": lambda x: x.layer is not None and x.layer.out is not None,
    "biases": lambda x: x.layer is not None and bool(x.layer.b),
    "context": lambda x: x.layer is not None and not np.array_equal(x.layer.x, x.layer.context, equal_nan=True),
}


def _scales(inputs: Diagnosed, which: float | str) -> list[Change]:
    """Other scales that differ from the right one: a number, or a name of what it is computed from."""
    p, right = inputs.problem, inputs.problem.scale
    one = right[:1] if len(np.unique(right)) == 1 else right[:0]  # one number for all heads
    widths = {"length": [p.queries, p.keys], "d_v": [inputs.v.shape[-1]], "all heads": [p.heads * p.d_k]}
    widths["d_model"] = [*widths["all heads"], *([] if inputs.layer is None else [inputs.layer.x.shape[-1]])]
    others: dict[Any, Any] = {name: [x**-0.5 for x in each if x not in (0, 1, p.d_k)] for name, each in widths.items()}
    d_k = np.array([p.d_k], np.float64)
    others |= {"d_k": d_k**-0.5, "1/d_k": 1 / d_k, "1/2d_k": 0.5 / d_k}
    others |= {"twice": one**2, "inverse": 1 / one, "log2 e": one * np.log2(np.e)}
    scales = {which} if isinstance(which, float) else {float(x) for x in others[which] if np.isfinite(x)}
    return [{"scale": x} for x in sorted(scales) if (abs(x - right) > 1e-9 * abs(right)).any()]


def _some(field: str, inputs: Diagnosed, value: str) -> list[Change]:
    """A change for each subset of a layer's square matrices, or of its biases."""
    arrays = {} if inputs.layer is None else getattr(inputs.layer, field)
    names = [name for name, x in arrays.items() if field == "b" or x.shape[0] == x.shape[1]]
    subsets = [some for many in range(1, len(names) + 1) for some in combinations(names, many)]
    return [{f"{field}_{name}": value for name in some} for some in subsets]


def _every_rule(inputs: Diagnosed, value: str) -> list[Change]:
    """A change for all rules that hide keys at once, then for each smaller set of at least two."""
    rules = [rule for names in MASKS for rule in names if rule != "kv_segments" and inputs.problem.uses(rule)]
    subsets = [some for many in range(len(rules), 1, -1) for some in combinations(rules, many)]
    return [dict.fromkeys(some, value) for some in subsets]


def _narrow(inputs: Diagnosed, *_: object) -> list[Change]:
    size = min(inputs.theirs.dtype.itemsize, inputs.problem.dtype.itemsize)
    names = [name for name, itemsize in (("float32", 4), ("float16", 2), ("bfloat16", 2)) if itemsize < size]
    return [{"half_dtype": name} for name in names]


def _blocks(inputs: Diagnosed, kind: str) -> list[Change]:
    """A change for each block size; sizes 2 and 4 only for up to 64 keys."""
    keys = inputs.problem.keys
    return [{"rescale": kind, "block": size} for size in BLOCKS if size < keys and (size > 4 or keys <= 64)]


COMPUTED: dict[str, Callable[[Diagnosed, str], list[Change]]] = {  # by the field that mistakes.toml names
    "scale": _scales,
    "w": partial(_some, "w"),
    "b": partial(_some, "b"),
    "every rule": _every_rule,
    "half_dtype": _narrow,
    "rescale": _blocks,
}
