"""Calls for the output alone, repeated: what the first call of a shape checked and decided is not done again.

The first call goes the long way (`ops/attention.py`). If the native engine ran it, the kernel keeps its description,
and the next call with the same rules, shapes and dtypes goes there directly. Results, errors and bits are the same.
"""

import sys
from collections.abc import Hashable, Mapping
from dataclasses import replace
from types import NoneType
from typing import Any

import numpy as np

from clearhead.core import room
from clearhead.core.call import Call
from clearhead.core.rules import POSITIONAL, RULES, along
from clearhead.engines import native
from clearhead.engines.threads import get_num_threads

_POSITIONS = POSITIONAL - along("heads")
_SAME_WHEREVER = RULES.keys() - POSITIONAL | _POSITIONS  # wherever the query stands
_PLAIN = frozenset(name for name, rule in RULES.items() if rule.always or not any(rule.fields.values()))
_MOST = 256  # different rules
_calls: dict[Hashable, Any] = {}  # the kernel's Repeatable, by kind of array and by rules


def without_position(rules: Mapping[str, Any], q: Any, k: Any) -> Mapping[str, Any]:
    """The rules without causal, window and query_offset where these say nothing: one query, at the last of the keys.

    So decoding repeats one call, although the query's position is another at every step.
    """
    offset = rules.get("query_offset")
    if type(offset) is not int or getattr(k, "shape", ())[-2:-1] != (offset + 1,):
        return rules
    return _at_the_last_key(rules, q, offset)


def _at_the_last_key(rules: Mapping[str, Any], q: Any, position: int) -> Mapping[str, Any]:
    """`without_position` for a first query that stands at the last key."""
    window = rules.get("window")
    if not rules.keys() <= _SAME_WHEREVER or type(rules.get("causal", False)) is not bool or q.shape[-2:-1] != (1,):
        return rules
    if window is not None and not (_is_window(window) and (window[0] is None or window[0] >= position)):
        return rules
    return {name: value for name, value in rules.items() if name not in _POSITIONS}


def spans_apart(rules: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
    """The rules without spans that the kernel can check itself, and these: three NumPy arrays, or None."""
    spans = rules.get("spans")
    if type(spans) is not tuple or len(spans) != 3 or not all(type(part) is np.ndarray for part in spans):
        return rules, None
    return {name: value for name, value in rules.items() if name != "spans"}, spans


def rules_key(rules: Mapping[str, Any]) -> Hashable:
    """What makes two calls' rules the same; None if one of them has values by query, key or head, or an odd one."""
    if not rules:
        return ()
    for name, value in rules.items():
        plain = name in _PLAIN and (type(value) in (bool, int, float) or _is_window(value))
        if value is not None and not plain:  # a single number for a rule with axes is checked against their lengths
            return None
    return (*rules.items(), *map(type, rules.values()))  # the types: True and 1 are equal


def _is_window(value: Any) -> bool:
    whole = type(value) is tuple and len(value) == 2 and all(type(side) in (int, NoneType) for side in value)
    return whole and all(side is None or side >= 0 for side in value)


def repeat(key: Hashable, q: Any, k: Any, v: Any, spans: Any = None) -> Any:
    """The output, if a call like this was checked before; else None, and the call must go the long way."""
    call = _calls.get((type(q), key))
    if call is None or not _plain(q, k, v):
        return None
    return call(q, k, v, spans, get_num_threads())


def step(q: Any, k: Any, v: Any, room: tuple[Any, Any], place: int, turns: Any, rules: Mapping[str, Any]) -> Any:
    """One step of decoding: write k and v (batch, kv_heads, 1, d) to `place` of the room, attend to all up to it.

    room     keys and values, (batch, kv_heads, places, d) each
    turns    by how much q and k are turned before, (2, d_k): see nn/rotary.py; None: not at all

    Returns the output (batch, heads, 1, d_v); None, before anything is changed, where the call must go the long way.
    """
    key = rules_key(_at_the_last_key({**rules, "query_offset": place}, q, place))
    call = _calls.get((type(q), key))
    if call is None or not _plain(q, k, v):
        return None
    output = call.step(q, k, v, *room, place, turns, get_num_threads())
    if output is not None:
        sys.modules["torch"].autograd.graph.increment_version(room)  # as PyTorch does where it writes itself
    return output


def remember(key: Hashable, q: Any, k: Any, v: Any, described: Call) -> None:
    """Let the next call with the same rules, shapes and dtypes be repeated, where these arrays allow it."""
    problem = described.problem
    if key is None or described.v is None or described.v.dtype != problem.dtype or not _plain(q, k, v):
        return
    if problem.batch * problem.heads * problem.queries * v.shape[-1] * problem.dtype.itemsize > room.SMALL:
        return  # such a call looks first whether there is room for its output
    call = _calls.get((type(q), key))
    if call is None:
        if len(_calls) >= _MOST:
            _calls.pop(next(iter(_calls)))
        tensor = None if type(q) is np.ndarray else sys.modules["torch"].Tensor
        call = _calls[type(q), key] = native.repeatable(tensor)
    any_keys = problem.keys > 0 and not problem.causal and problem.window == (None, None)  # as in decoding
    if problem.span_table is not None:
        problem = replace(problem, query_spans=None, key_spans=None, span_table=None)
    call.add(q, k, v, native.described(problem), any_keys)


def _plain(q: Any, k: Any, v: Any) -> bool:
    """Are these arrays of one kind, on the CPU, that nothing records, casts, wraps or traces?"""
    kind = type(q)
    if kind is np.ndarray:
        return type(k) is kind and type(v) is kind
    torch = sys.modules.get("torch")
    if torch is None or not unobserved(q, k, v) or torch.autograd.forward_ad._current_level >= 0:
        return False
    return not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))


def unobserved(*tensors: Any) -> bool:
    """Are these plain tensors that nothing casts, transforms, traces or compiles? They may carry tangents."""
    torch, c = sys.modules["torch"], sys.modules["torch"]._C
    traced = torch.compiler.is_compiling() or c._are_functorch_transforms_active()
    if traced or c._get_tracing_state() is not None or c._len_torch_dispatch_stack():
        return False
    for x in tensors:  # not any(…), which takes as long as a short call does when the caches are cold
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_neg():
            return False
    return not torch.is_autocast_enabled("cpu")
