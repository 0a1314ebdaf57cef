"""The mistakes that diagnose knows, each a small change of the textbook's recipe with the words for it.

They are data: mistakes.toml has a table for each, and values.toml the words for a recipe's values. What depends on
the inputs is computed here, by the names that the data use: the conditions under which a mistake can be made, and the
changes with other scales, sizes of blocks and narrower dtypes, and of some of several matrices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from math import prod
from typing import Any, Literal

import numpy as np

from clearhead.core.arrays import unrepeated
from clearhead.core.files import toml_of
from clearhead.core.rules import RULES
from clearhead.diagnosing.recipe import STAGES, Change, Diagnosed
from clearhead.diagnosing.rule_changes import MASKS
from clearhead.words import Language

BLOCKS = (8, 16, 32, 64, 128)  # the usual sizes
Sentence = Mapping[Language, str]  # {field} stands for a changed field of the recipe
_ANY: Sentence = {"en": "other random numbers, and sizes that all differ", "zh": "换一组随机数，且各维大小互不相同"}


@dataclass(frozen=True, eq=False, slots=True)
class Mistake:
    """A mistake that people make."""

    name: str
    changes: tuple[Change, ...]  # each with the condition `when` it can be made
    did: Sentence  # what their code did
    mend: Sentence  # the line to change
    needs: Sentence  # what an input must have to show it
    when: tuple[str, ...] = ()  # the conditions under which it can be made
    rule: str = ""  # the caller's rule that it breaks, another condition; by default that of the field it changes
    # It gives theirs exactly; also where only a number of keys shows it; or only as far as rounding goes.
    evidence: Literal["numbers", "a size", "rounding"] = "numbers"
    alone: bool = False  # never tried together with another mistake
    seldom: bool = False  # never tried together with another seldom one

    def variants(self, inputs: Diagnosed) -> list[Change]:
        """The changes that these inputs allow."""
        if not all(holds(condition, inputs) for condition in (*self.when, self.rule) if condition):
            return []
        result: list[Change] = []
        for change in (c for c in self.changes if "when" not in c or holds(c["when"], inputs)):
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
    """What the values of a recipe's fields mean: the words by field and value."""
    return toml_of("clearhead.diagnosing", "values.toml")


def _mistake(name: str, table: dict[str, Any], tables: dict[str, Any], needs: dict[str, str], kind: str) -> Mistake:
    when = table.pop("when", ())
    for what in ("did", "mend"):
        sentence = table[what]
        if isinstance(sentence, dict) and "as" in sentence:  # the same as another mistake's
            sentence = tables[sentence["as"]][what]
        table[what] = {"en": sentence, "zh": sentence} if isinstance(sentence, str) else sentence
    table["needs"] = {"en": table["needs"], "zh": needs[table["needs"]]} if "needs" in table else _ANY
    table["changes"] = tuple(  # TOML has no tuples, and no None for a number that is solved from theirs
        {field: None if x == "solved" else tuple(x) if isinstance(x, list) else x for field, x in change.items()}
        for change in table["changes"]
    )
    field = next(iter(table["changes"][0]))
    rule = "rotary" if field.startswith("rotary") else field  # most fields are called as the rule
    table.setdefault("rule", rule if rule in {"rotary", *RULES} - {"scale"} else "")
    return Mistake(name, when=(when,) if isinstance(when, str) else tuple(when), seldom=kind == "seldom", **table)


def holds(condition: str, inputs: Diagnosed) -> bool:
    """Does the condition hold? It is a key of the table below, or a rule that is in use."""
    of = CONDITIONS.get(condition)
    return inputs.problem.uses(condition) if of is None else of(inputs)


def _hides(inputs: Diagnosed) -> bool:
    """Does a rule, a bias or a table of spans hide keys from queries?"""
    p = inputs.problem
    scored = [unrepeated(x) for x in (p.bias, p.span_table) if x is not None]
    ruled = any(p.uses(rule) for names in MASKS for rule in names if rule != "query_lengths")
    return ruled or any(bool(np.isneginf(x).any()) for x in scored)


def _cached(inputs: Diagnosed) -> bool:
    """May the queries be the newest tokens after a cache?"""
    p = inputs.problem
    last = p.causal and bool((p.query_offset == p.keys - p.queries).all())
    return p.keys > p.queries and (p.queries == 1 or last)


# Where a mistake is not looked for without its condition: it would be another one, or cost much, or there is none. One
# that cannot be made for its shapes raises ValueError or IndexError; one that changes no number, or only those of later
# steps than theirs, explains nothing.
CONDITIONS: dict[str, Callable[[Diagnosed], bool]] = {
    "several heads": lambda x: x.problem.heads > 1,
    "several entries": lambda x: x.problem.batch > 1,
    "several matrices": lambda x: x.problem.heads * x.problem.batch > 1,
    "few weights": lambda x: prod(x.problem.shape) <= 2**21,
    "positions": lambda x: x.problem.uses("causal") or x.problem.uses("window"),
    "several corners": lambda x: x.problem.queries != x.problem.keys or bool(x.problem.query_offset.any()),
    "cache": _cached,
    "groups": lambda x: x.problem.kv_heads not in (1, x.problem.heads),
    "NaN in theirs": lambda x: bool(np.isnan(x.theirs.astype(np.float64)).any()),
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
    """Other scales, where they differ from the right one: a number, or one that is named after what it comes from."""
    p, right = inputs.problem, inputs.problem.scale
    d_model = [] if inputs.layer is None else [inputs.layer.x.shape[-1]]
    widths = {"length": sorted({p.queries, p.keys} - {1}), "d_model": [p.heads * p.d_k, *d_model]}
    widths |= {"d_k": [p.d_k], "d_v": [inputs.v.shape[-1]], "all heads": [p.heads * p.d_k]}
    one = right[:1] if len(np.unique(right)) == 1 else right[:0]  # one number for all heads
    others = {"twice": [*one**2], "inverse": [*1 / one[one != 0]], "log2 e": [*one * np.log2(np.e)]}
    others |= {"1/d_k": [1 / p.d_k], "1/2d_k": [0.5 / p.d_k]} if p.d_k else {"1/d_k": [], "1/2d_k": []}
    for name, each in widths.items():  # divided by the square root of a width
        others[name] = [width**-0.5 for width in each if width and (name == "d_k" or width != p.d_k)]
    scales = {which} if isinstance(which, float) else {*others[which]}
    return [{"scale": float(x)} for x in sorted(scales) if (abs(x - right) > 1e-9 * abs(right)).any()]


def _overflows(inputs: Diagnosed, *_: object) -> list[Change]:
    """The dtypes whose range exp can leave where no maximum is subtracted; only NaN in theirs shows that."""
    if np.isfinite(inputs.theirs.astype(np.float64)).all():
        return []
    names = {dtype.name for dtype in (inputs.theirs.dtype, inputs.problem.dtype)} & {"float16", "float64"}
    return [{"overflow": name} for name in sorted({*names, "float32"})]


def _later_steps(inputs: Diagnosed, *_: object) -> list[Change]:
    """The later steps up to the weights that change the numbers."""
    uses = inputs.problem.uses
    works = {
        "scaled": bool((inputs.problem.scale != 1).any()),
        "capped": uses("softcap"),
        "masked": _hides(inputs),
        "weights": True,
    }
    works["biased"] = any(map(uses, ("bias", "alibi_slopes", "spans")))
    later = STAGES[STAGES.index(inputs.stage) + 1 :]  # an earlier step means a missing rule, which has its own entry
    return [{"step": step} for step in later if works.get(step)]


def _some(field: str, inputs: Diagnosed, value: str) -> list[Change]:
    """Each subset of a layer's square matrices, or of its biases."""
    arrays = {} if inputs.layer is None else getattr(inputs.layer, field)
    names = [name for name, x in arrays.items() if field == "b" or x.shape[0] == x.shape[1]]
    subsets = [some for many in range(1, len(names) + 1) for some in combinations(names, many)]
    return [{f"{field}_{name}": value for name in some} for some in subsets]


def _chunks(inputs: Diagnosed, *_: object) -> list[Change]:
    """Chunks as wide as the window, or as one of its sides."""
    left, right = inputs.problem.window
    sizes = set() if left is None else {left, left + 1, left + 1 + (right or 0)} - {0}
    return [{"chunk": size} for size in sorted(sizes) if size < inputs.problem.keys]


def _every_rule(inputs: Diagnosed, value: str) -> list[Change]:
    """All rules that hide keys at once, or at least two of them; the most first."""
    rules = [rule for names in MASKS for rule in names if rule != "kv_segments" and inputs.problem.uses(rule)]
    subsets = [some for many in range(len(rules), 1, -1) for some in combinations(rules, many)]
    return [dict.fromkeys(some, value) for some in subsets]


def _narrow(inputs: Diagnosed, *_: object) -> list[Change]:
    size = min(inputs.theirs.dtype.itemsize, inputs.problem.dtype.itemsize)
    names = [name for name, itemsize in (("float32", 4), ("float16", 2), ("bfloat16", 2)) if itemsize < size]
    return [{"half_dtype": name} for name in names]


def _sizes(length: int) -> list[int]:
    """The usual sizes of blocks; 2 and 4 only where the length is short."""
    return [size for size in (2, 4) if length <= 64] + [size for size in BLOCKS if size < length]


def _in_blocks(field: str, inputs: Diagnosed, kind: str) -> list[Change]:
    """A bug of some kind in blocks of each size."""
    return [{field: (kind, size)} for size in _sizes(inputs.problem.keys)]


def _key_tails(inputs: Diagnosed, kind: str) -> list[Change]:
    """One size of blocks for each number of keys that are skipped behind the last whole one, or of zeros read there."""
    keys = inputs.problem.keys
    uneven = sorted((size for size in _sizes(keys) if keys % size), reverse=True)
    by_tail = {keys % size if kind == "skipped" else -keys % size: size for size in uneven}
    return [{"key_tail": (kind, size)} for size in sorted(by_tail.values())]


COMPUTED: dict[str, Callable[[Diagnosed, str], list[Change]]] = {  # by the field that mistakes.toml names
    "scale": _scales,
    "overflow": _overflows,
    "step": _later_steps,
    "w": partial(_some, "w"),
    "b": partial(_some, "b"),
    "chunk": _chunks,
    "every rule": _every_rule,
    "half_dtype": _narrow,
    "blocks": partial(_in_blocks, "blocks"),
    "tile": partial(_in_blocks, "tile"),
    "key_tail": _key_tails,
}
