"""varlen_attn with PyTorch's signature: requests of different lengths in one call, whose keys may lie in pages.

The native engine reads pages in place (native/ragged.hpp). For any other engine, each request's keys are gathered and
the requests run one after the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from clearhead import engines
from clearhead.core.arrays import DeviceArray, as_array, bfloat16
from clearhead.core.axes import Array
from clearhead.core.call import Call
from clearhead.core.observations import check_asked, check_room
from clearhead.core.problem import Problem, problem_of
from clearhead.core.rule_values import as_int64, is_whole, read_flag
from clearhead.core.rules import with_options
from clearhead.core.statistics import STATISTICS, Asked, Wanted
from clearhead.engines import native
from clearhead.engines.base import Engine, Kind, kinds
from clearhead.errors import DtypeError, RuleError, ShapeError, expected, shown
from clearhead.ops.observation import observation

_KEYS = ("received",)  # statistics per key; all others are per query
_OBSERVED = tuple(name for name, one in STATISTICS.items() if one.asked != "v" and one.computed == "rows") + _KEYS
_RUN = 16  # a page has a multiple of so many rows: kRun in native/attend.hpp
_NAMES = ("query", "key", "value")
Arrays = tuple[Array, ...]  # query, key and value
Where = tuple[Array, Array | None, Array, Array | None]  # cu_seq_q, cu_seq_k, seqused_k, block_table
Prepared = Callable[[Arrays, Where, Array | None], dict[str, Array]]


@with_options
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None = None,
    max_q: int | None = None,  # noqa: ARG001  PyTorch's signature
    max_k: int | None = None,  # noqa: ARG001
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,  # noqa: ARG001
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    engine: str | None = None,
    **asked: Unpack[Asked],
) -> Any:
    """`torch.nn.attention.varlen.varlen_attn` on the CPU, with statistics: a ragged batch of requests in one call.

    query         (tokens, heads, d_k): the queries of all requests, one request after the other; float64, float32,
                  bfloat16 or float16
    key           (blocks, page, kv_heads, d_k) with block_table, page a multiple of 16; without it (tokens, kv_heads,
                  d_k), packed like the queries. Any strides, such as the page layouts of vLLM and FlashAttention
    value         (…, kv_heads, d_v), likewise
    cu_seq_q      (requests + 1,), int32 or int64: where each request's queries begin, then the number of tokens
    cu_seq_k      (requests + 1,), int32 or int64: likewise for the keys; needed without block_table
    seqused_k     (requests,), int32 or int64: how many keys each request has; needed with block_table
    block_table   (requests, most pages), int32: each request's pages in order. Requests may share pages; entries, pages
                  and rows beyond a request's keys are never read
    window_size   (left, right) keys around a query's position, -1 for no limit; (-1, 0) is causal. A request's last
                  query stands at its last key
    enable_gqa    key heads may be fewer; query head h reads key head h // group
    scale, softcap, alibi_slopes, sinks, engine   as in `clearhead.attention`
    asked         logsumexp, max_logit, entropy, distance, diagonal, received (each True), top=k

    Returns the output, (tokens, heads, d_v), in query's dtype; with `return_aux=AuxRequest(lse=True)` also the
    log-sum-exp, (tokens, heads). If statistics are requested, returns an `Observation` instead: `output`, and per query
    (tokens, heads) or (tokens, heads, k), in float32 (float64 for float64); `received`, the sum of the weights on each
    key over this call's queries, is (keys of all requests in order, heads).

    Each request's results equal those of the request alone with contiguous keys, bit for bit, whatever else is in the
    batch; max_q, max_k and num_splits, which PyTorch needs, change nothing. O(tokens·keys·(d_k + d_v)) time; no page is
    copied. For inference: tensors that require grad raise DtypeError. Raises, before any number is read, ShapeError,
    DtypeError or RuleError for arguments that do not fit, such as a block number that is out of range.

    >>> import torch
    >>> x, ends = torch.eye(2)[:, None], torch.tensor([0, 2])
    >>> varlen_attn(x, x, x, ends, ends, window_size=(-1, 0))[0, 0]
    tensor([1., 0.])
    """
    lse = return_aux is not None and read_flag("return_aux.lse", getattr(return_aux, "lse", return_aux))
    named: dict[str, Any] = {**asked, "logsumexp": True} if lse else dict(asked)
    want = Wanted(output=True, **check_asked(named, _OBSERVED, ()))
    rules = _rules(window_size, scale, softcap, alibi_slopes, sinks)
    (q, restore), (k, _), (v, _) = (as_array(x, name) for name, x in zip(_NAMES, (query, key, value), strict=True))
    where = _where((q, k, v), (cu_seq_q, cu_seq_k, seqused_k, block_table), enable_gqa)
    problem = _problem((q, k, v), 1, 1, rules)
    chosen, keys = engines.get(engines.choose(problem, engine, want).engine), int(where[2].sum())
    check_room(replace(problem, rows=range(len(q)), cols=range(keys)), want, v.shape[-1])
    answers = _room(_kinds(chosen, problem, want, v.shape[-1]), problem.heads, len(q), keys)
    _fill(chosen, problem, rules, (q, k, v), where, want, answers)
    results = {name: restore(x) for name, x in answers.items()}
    if asked:
        return observation(results, len(query), int(key.shape[0]))
    return (results["output"], results["largest"] + results["log_sum"]) if lse else results["output"]


def _rules(window_size: Any, scale: Any, softcap: Any, alibi_slopes: Any, sinks: Any) -> Any:
    """Read the rules, which hold for every request."""
    sides = window_size if isinstance(window_size, (tuple, list)) else ()
    if len(sides) != 2 or not all(is_whole(side) and side >= -1 for side in sides):
        hint = "window_size=(-1, 0) is causal, (255, 0) sees the last 256 keys, (-1, -1) all."
        raise RuleError(expected("window_size", window_size, "(left, right), each from 0 up, or -1 for no limit"), hint)
    window = tuple(None if side < 0 else int(side) for side in sides)
    return {"window": window, "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks}


def _where(arrays: Arrays, given: tuple[Any, ...], enable_gqa: Any) -> Where:
    """Read where each request's queries and keys lie. Raises if shapes do not fit; reads no number of q, k or v."""
    (q, k, v), (cu_seq_q, cu_seq_k, seqused_k, block_table) = arrays, given
    keys = "(tokens, kv_heads, d)" if block_table is None else "(blocks, page, kv_heads, d)"
    for name, x, axes in (("query", q, "(tokens, heads, d)"), ("key", k, keys), ("value", v, keys)):
        if x.ndim != axes.count(",") + 1:
            raise ShapeError(f"{name} has shape {x.shape}: expected {axes}.")
        if isinstance(x, DeviceArray):
            raise RuleError(f"{name} is on device {x.device}: ragged batches are computed on the CPU.", f"{name}.cpu()")
    if k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(f"key is {k.shape} and value {v.shape}: all but their widths must agree.")
    if not read_flag("enable_gqa", enable_gqa) and q.shape[1] != k.shape[-2]:
        hint = "enable_gqa=True lets query heads share key heads."
        raise ShapeError(f"query has {q.shape[1]} heads but key has {k.shape[-2]}.", hint)
    starts = _ends("cu_seq_q", cu_seq_q, len(q), "query")
    if block_table is None:
        ends = _ends("cu_seq_k", cu_seq_k, len(k), "key")
        room, places = np.diff(ends), None
    else:
        ends, places = None, as_array(block_table, "block_table")[0]
        if places.dtype != np.int32 or places.ndim != 2:
            raise DtypeError(f"block_table is {places.dtype} {places.shape}: expected int32, (requests, pages).")
        if k.shape[1] % _RUN or not k.shape[1]:
            raise ShapeError(f"key has pages of {k.shape[1]}: expected a multiple of {_RUN}.")
        room = np.full(len(places), places.shape[1] * k.shape[1])
    lengths = room if block_table is None and seqused_k is None else _whole("seqused_k", seqused_k)
    for name, count in (("keys", len(room)), ("seqused_k", len(lengths))):
        if count != len(starts) - 1:
            raise ShapeError(f"cu_seq_q has {len(starts) - 1} requests but there are {name} for {count}.")
    if (lengths < 0).any() or (lengths > room).any():
        raise RuleError(f"seqused_k is {shown(lengths.tolist())}: there is room for {shown(room.tolist())}.")
    if places is not None:
        used = np.arange(places.shape[1]) < -(-lengths[:, None] // k.shape[1])
        for request, page in np.argwhere(used & ((places < 0) | (places >= len(k))))[:1]:
            raise RuleError(f"block_table[{request}, {page}] is {places[request, page]}: key has {len(k)} blocks.")
    return starts, ends, lengths, None if places is None else np.ascontiguousarray(places)


def _whole(name: str, value: Any) -> Array:
    """Read one axis of whole numbers as int64."""
    array = as_array(value, name)[0]
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DtypeError(f"{name} is {shown(value)}: expected a tensor of whole numbers with one axis.")
    return as_int64(name, array)


def _ends(name: str, value: Any, count: int, of: str) -> Array:
    """Read and check cumulative lengths."""
    ends = _whole(name, value)
    if not len(ends) or ends[0] or ends[-1] != count or (ends[1:] < ends[:-1]).any():
        raise RuleError(f"{name} is {shown(ends.tolist())}: expected to rise from 0 to the {count} tokens of {of}.")
    return ends


def _problem(arrays: Arrays, queries: int, keys: int, rules: Any) -> Problem:
    """The problem of a request with so many queries and keys."""
    shapes = [(x.shape[-2], size, x.shape[-1]) for x, size in zip(arrays, (queries, keys, keys), strict=True)]
    return problem_of(shapes, tuple(x.dtype for x in arrays), "cpu", "torch", rules)


def _kinds(engine: Engine, problem: Problem, want: Wanted, d_v: int) -> dict[str, Kind]:
    """The dtype of each answer, and its axes after (tokens, heads) or (keys, heads), by name."""
    each = kinds(problem, want, want.names(), engine.STATISTICS, d_v)
    return {name: (shape[3:], dtype) for name, (shape, dtype) in each.items()}


def _room(each: Mapping[str, Kind], heads: int, tokens: int, keys: int) -> dict[str, Array]:
    """Uninitialised arrays for the answers of a ragged batch, (tokens, heads, …) and (keys, heads), by name."""
    return {
        name: np.empty((keys if name in _KEYS else tokens, heads, *axes), dtype) for name, (axes, dtype) in each.items()
    }


def prepared(arrays: Arrays, rules: dict[str, Any], asked: Any) -> Prepared:
    """Read once what calls on such arrays share, and return a function that computes them.

    The function takes query, key and value as `read_bits` gives them, where the requests lie, and an array for the
    output or None; it returns the requested statistics by name. `rules` are those of `varlen_attn`, with window_size.
    """
    want = Wanted(output=True, **check_asked(asked, _OBSERVED, ()))
    read = _rules(*map(rules.get, ("window_size", "scale", "softcap", "alibi_slopes", "sinks")))
    problem = _problem(tuple(map(_number, arrays)), 1, 1, read)
    chosen = engines.get(engines.choose(problem, None, want).engine)
    wants = {attends: replace(want, output=attends) for attends in (True, False)}
    each = _kinds(chosen, problem, wants[False], 0)

    def answer(arrays: Arrays, where: Where, output: Array | None) -> dict[str, Array]:
        answers = _room(each, problem.heads, len(arrays[0]), int(where[2].sum()))
        room = answers if output is None else {**answers, "output": output}
        _fill(chosen, problem, read, arrays, where, wants[output is not None], room)
        return answers

    return answer


def _fill(
    engine: Engine, problem: Problem, rules: Any, arrays: Arrays, where: Where, want: Wanted, results: dict[str, Array]
) -> None:
    """Compute the answers: all requests at once, or one after the other if the engine cannot read ragged batches."""
    if engine is native:
        q, k, v = arrays
        native.ragged(problem, q, k, v, where, results)
        return
    (q, k, v), first, (starts, ends, lengths, table) = map(_number, arrays), 0, where
    for request, (start, stop) in enumerate(pairwise(starts.tolist())):
        count = int(lengths[request])
        chosen = slice(count) if ends is None else slice(ends[request], ends[request] + count)
        pages = slice(None) if table is None else table[request, : -(-count // k.shape[1])]
        local = (x[pages].reshape(-1, *x.shape[-2:])[chosen] for x in (k, v))
        a, b, c = (x[None].swapaxes(1, 2) for x in (q[start:stop], *local))
        offset = {"query_offset": count - (stop - start)}
        one = _problem((q, k, v), stop - start, count, rules | offset)
        answers = engines.answer(engine, Call(one, a, b, c), want)
        for name, x in results.items():
            part = slice(first, first + count) if name in _KEYS else slice(start, stop)
            _number(x)[part] = answers[name][0].swapaxes(0, 1)
        first += count


def _number(x: Array) -> Array:
    """View an array from `read_bits` as numbers again."""
    return x.view(bfloat16) if x.dtype == np.int16 else x


def read_bits(x: Tensor | None) -> Any:
    """View a plain tensor as an array without a copy: bfloat16 as int16."""
    return None if x is None else x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
