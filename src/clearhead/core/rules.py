"""The score rules: one table, from which everything that lists rules is derived.

An entry says how a rule's value is read, which fields of a Problem hold it, and along which axes these lie. A new rule
needs an entry here, a keyword of `Rules`, its fields in `Problem`, and its arithmetic in definition.py or visibility.py
and in every engine. Engines, and all other code that must know a rule by name (PyTorch's operators, the pages), declare
the set of rules that they support and refuse others: EVERYWHERE, plus the rules that only they have.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, Literal, TypedDict, TypeVar, cast, get_args, get_origin

import numpy as np

from clearhead.core.axes import WEIGHTS, as_places, as_slice
from clearhead.core.rule_values import (
    Extent,
    Window,
    read_flag,
    read_heads,
    read_lengths,
    read_matrix,
    read_offset,
    read_scale,
    read_segments,
    read_softcap,
    read_window,
)
from clearhead.core.spans import TABLE, read_spans
from clearhead.errors import RuleError, unknown

Axes = tuple[str, ...]
Index = range | slice | list[int] | np.ndarray[Any, np.dtype[Any]]
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Rules(TypedDict, total=False):
    """The score rules: the same keywords everywhere, all optional, in the order in which they act."""

    scale: Any
    softcap: float | None
    bias: Any
    alibi_slopes: Any
    spans: Any
    causal: bool
    window: Window | None
    mask: Any
    kv_lengths: Any
    query_lengths: Any
    query_segments: Any
    kv_segments: Any
    sinks: Any
    query_offset: Any


Read = Callable[[str, Any, Extent, Mapping[str, Any]], Any]  # of name, value, sizes, fields read so far


@dataclass(frozen=True, slots=True)
class Rule:
    """One score rule.

    read      validates the value and returns it as its fields hold it; a tuple where there are several fields
    fields    the fields of a Problem that hold it, with the axes of each; () for what is no array
    unused    the value of its fields while the rule is not in use
    neutral   the number that has no effect, for a rule whose value is an array
    logits    do logits scale with its numbers? Then dividing all such rules by t divides the logits by t
    forbids   can it forbid a query to attend to a key?
    always    does it have a value in every problem? Then None is read too and gives the default
    """

    read: Read
    fields: Mapping[str, Axes]
    unused: Any = None
    neutral: float | None = None
    logits: bool = False
    forbids: bool = False
    always: bool = False


RULES: dict[str, Rule] = {  # in the order of `Rules`
    "scale": Rule(read_scale, {"scale": ("heads",)}, logits=True, always=True),
    "softcap": Rule(lambda _, value, *__: read_softcap(value), {"softcap": ()}, logits=True),
    "bias": Rule(read_matrix, {"bias": WEIGHTS}, neutral=0.0, logits=True, forbids=True),  # where it is -inf
    "alibi_slopes": Rule(read_heads, {"alibi_slopes": ("heads",)}, neutral=0.0, logits=True),
    "spans": Rule(
        lambda _, value, sizes, __: read_spans(value, sizes.prefix, (sizes.queries, sizes.keys)),
        {"query_spans": ("batch", "queries"), "key_spans": ("batch", "keys"), "span_table": TABLE},
        logits=True,
        forbids=True,  # where the table is -inf
    ),
    "causal": Rule(lambda name, value, *_: read_flag(name, value), {"causal": ()}, unused=False, forbids=True),
    "window": Rule(lambda _, value, *__: read_window(value), {"window": ()}, unused=(None, None), forbids=True),
    "mask": Rule(read_matrix, {"mask": WEIGHTS}, neutral=True, forbids=True),
    "kv_lengths": Rule(read_lengths, {"kv_lengths": ("batch",)}, forbids=True),
    "query_lengths": Rule(read_lengths, {"query_lengths": ("batch",)}, forbids=True),
    "query_segments": Rule(read_segments, {"query_segments": ("batch", "queries")}, forbids=True),
    "kv_segments": Rule(read_segments, {"kv_segments": ("batch", "keys")}, forbids=True),
    "sinks": Rule(read_heads, {"sinks": ("heads",)}, neutral=-np.inf, logits=True),
    "query_offset": Rule(read_offset, {"query_offset": ("batch",)}, always=True),
}
EVERYWHERE = frozenset({  # the rules that all of them support; a new rule joins once all of them do
    "scale", "softcap", "bias", "alibi_slopes", "spans", "causal", "window", "mask", "kv_lengths", "query_lengths",
    "query_segments", "kv_segments", "sinks", "query_offset",
})  # fmt: skip
FIELDS: dict[str, Axes] = {field: axes for rule in RULES.values() for field, axes in rule.fields.items()}
BROADCAST = tuple(field for field, axes in FIELDS.items() if axes[:2] == WEIGHTS[:2])  # over batch and heads


def with_options(function: _Function) -> _Function:
    """A decorator that names each of a function's **rules: Unpack[Rules] in its signature, as help shows it."""
    shown = signature(function)
    *named, options = shown.parameters.values()
    (keywords,) = get_args(options.annotation)
    for name, kind in keywords.__annotations__.items():
        default = kind() if kind in (bool, int) else get_args(kind)[0] if get_origin(kind) is Literal else None
        named.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    function.__signature__ = shown.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def along(axis: str) -> frozenset[str]:
    """The rules with a value for each place of an axis.

    >>> sorted(along("keys"))
    ['bias', 'kv_segments', 'mask', 'spans']
    """
    return frozenset(name for name, rule in RULES.items() if any(axis in axes for axes in rule.fields.values()))


def check_names(rules: Rules) -> None:
    """Raise UnknownNameError for a name that is not in the table."""
    for name in rules:
        if name not in RULES:
            raise unknown("rule", name, RULES)


def read(rules: Rules, sizes: Extent) -> dict[str, Any]:
    """The fields of a Problem that hold the rules' values, validated. Raises RuleError, ShapeError or DtypeError."""
    check_segments(rules)
    result: dict[str, Any] = {}
    for name, rule in RULES.items():
        value = rules.get(name)
        if value is None and not rule.always:
            result.update(dict.fromkeys(rule.fields, rule.unused))
        else:
            result.update(read_one(name, value, sizes, result))
    return result


def read_one(name: str, value: Any, sizes: Extent, before: Mapping[str, Any]) -> dict[str, Any]:
    """Read one rule's value as the fields that hold it; `before` has the fields of causal and window if in use."""
    rule = RULES[name]
    values = rule.read(name, value, sizes, before)
    return dict(zip(rule.fields, values if len(rule.fields) > 1 else (values,), strict=True))


def check_segments(rules: Rules) -> None:
    """Raise RuleError where only one side has segments."""
    one, other = "query_segments", "kv_segments"
    if (rules.get(one) is None) != (rules.get(other) is None):
        one, other = (one, other) if rules.get(one) is not None else (other, one)
        raise RuleError(f"{one} is given but {other} is not: a segment needs both sides.", f"{other}={one}?")


def flat(rules: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values by name, with `spans` split into spans[0], spans[1] and spans[2]."""
    parts = rules.get("spans")
    if not isinstance(parts, (tuple, list)) or len(parts) > len(RULES["spans"].fields):
        return rules  # a tuple that is too long is not copied; reading it refuses it
    rest = {name: value for name, value in rules.items() if name != "spans"}
    return rest | {f"spans[{place}]": part for place, part in enumerate(parts)}


def joined(values: Mapping[str, Any]) -> Rules:
    """The rules of `flat` values."""
    parts = [name for name in values if name.startswith("spans[")]
    rules: Any = {name: value for name, value in values.items() if name not in parts}
    return cast("Rules", rules | ({"spans": tuple(values[name] for name in sorted(parts))} if parts else {}))


def turned_on(rules: Mapping[str, Any]) -> list[str]:
    """The names of the rules that a caller's keywords turn on."""
    return [name for name, value in rules.items() if value is not None and value is not False]


def refusals(who: str, supported: frozenset[str], used: Iterable[str]) -> list[str]:
    """Why `who` cannot compute with these rules: a sentence for each that it does not support."""
    return [f"{who} has no rule `{name}`." for name in used if name not in supported]


def check_supported(who: str, supported: frozenset[str], used: Iterable[str]) -> None:
    """Raise RuleError for a rule that `who` does not support."""
    for reason in refusals(who, supported, used):
        raise RuleError(reason)


def take(values: Mapping[str, Any], chosen: Mapping[str, Index]) -> dict[str, Any]:
    """Slice fields of a Problem along named axes, such as {"heads": range(2), "keys": range(9)}.

    values   by field; arrays or tensors; None and plain numbers stay as they are
    chosen   by axis; a range or a slice, which copy nothing, an array, or, for tensors, a list

    An axis of size 1 is broadcast and stays as it is, unless the index is a slice or selects nothing.
    """
    result = dict(values)
    for name, x in values.items():
        if not hasattr(x, "shape"):
            continue
        slices: list[slice] = [slice(None)] * len(FIELDS[name])
        picked = []
        for place, axis in enumerate(FIELDS[name]):
            index = chosen.get(axis)
            if index is None or (x.shape[place] == 1 and not isinstance(index, slice) and len(index)):
                continue
            if isinstance(index, np.ndarray) and isinstance(x, np.ndarray) and not x.strides[place]:
                index = slice(len(index))  # a broadcast axis: all entries are the same
            if isinstance(index, (range, slice)):
                slices[place] = as_slice(index) if isinstance(index, range) else index
            else:
                picked.append((place, as_places(index) if isinstance(index, np.ndarray) else index))
        part = x[tuple(slices)]
        for place, one in picked:
            part = part[(*[slice(None)] * place, one)]
        result[name] = part
    return result
