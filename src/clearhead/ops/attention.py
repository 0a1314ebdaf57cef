"""attention(), which computes the output, and plan(), which says which engine computes it."""

import sys
from types import ModuleType
from typing import Any, Unpack

from clearhead import engines
from clearhead.core.arrays import as_array
from clearhead.core.call import Given, describe, describe_whole, known
from clearhead.core.observations import check_room
from clearhead.core.rules import Rules, flat, with_options
from clearhead.core.statistics import Wanted
from clearhead.core.torch_state import graphed, ungraphed
from clearhead.engines import native

_OUTPUT = Wanted(output=True)


@with_options
def attention(q: Any, k: Any, v: Any, *, engine: str | None = None, **rules: Unpack[Rules]) -> Any:
    """softmax(scale·q·kᵀ + …)·v, exactly; the weights are never stored.

    q             (…, heads, queries, d_k), or (queries, d_k); float64, float32, bfloat16 or float16
    k             (…, kv_heads, keys, d_k); heads is a multiple of kv_heads
    v             (…, kv_heads, keys, d_v)
    engine        run this engine or raise EngineError with its reasons; None chooses the fastest that can
    scale         default 1/√d_k; one number, or (heads,)
    softcap       c: scores become c·tanh(s/c)
    bias          float, broadcasts to (…, heads, queries, keys); -inf forbids, and ±2^127 is the most that it adds
    alibi_slopes  (heads,): subtracts slope·|i - j|
    spans         (query_spans, key_spans, table): adds table[query_spans[i], key_spans[j]], where -inf forbids. Labels
                  (batch, queries) or (queries,), and (batch, keys) or (keys,), below 0 for none; table (query_spans,
                  key_spans), broadcasts to (…, heads, query_spans, key_spans)
    causal        key j ≤ query i + query_offset
    window        (left, right) keys around the query's position, either may be None
    mask          bool, broadcasts to (…, heads, queries, keys), True = may attend
    kv_lengths, query_lengths     (batch,): what lies beyond is padding
    query_segments, kv_segments   (batch, queries), (batch, keys): attend within the same segment only
    sinks         (heads,): an extra logit in each row's denominator
    query_offset  int or (batch,): the first query's position among the keys; 0 when queries = keys

    Returns (…, heads, queries, d_v) in q's dtype and kind. A row with nothing to attend to gives 0.
    Raises, before any work: ShapeError, DtypeError, RuleError or UnknownNameError for inputs that do not fit;
    EngineError when no engine, or not the one named, can run; SizeError when the output is larger than memory.
    PyTorch tensors have derivatives of every order and forward mode, also through torch.func; vmap makes one call of
    the mapped axis. The first derivative is fused; the others are recomputed in blocks, which takes longer.
    O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory; forbidden blocks cost nothing.

    Of PyTorch's DTensors each rank computes its part, and the result is a DTensor sharded as q is; over queries, k and
    v are gathered. DtypeError for placements that do not go with q's, before anything is sent.

    How exact: nothing is left out or approximated at any length; what remains is rounding. The root mean square error
    over a whole tensor, against float64, is at most 1.25 times that of PyTorch's fused kernel in the same dtype. This
    holds for tensors with many elements: for a single query or element either of the two may be closer to the float64
    result, by chance and by a larger factor.
    Source: Vaswani et al. 2017, section 3.2.1; computed by online softmax (Milakov & Gimelshein 2018).

    >>> import numpy as np, clearhead as ch
    >>> ch.attention(np.eye(2), np.eye(2), np.array([[1.0, 0.0], [0.0, 1.0]])).round(3)
    array([[0.67, 0.33],
           [0.33, 0.67]])
    """
    problem = known(q, k, v, rules)
    if problem is not None and engine is None and native.usable(problem):
        output = native.output(problem, q, k, v)
        if output is not None:
            return output
    elif problem is None and graphed(q, k, v, *flat(rules).values()):
        if v is None:
            as_array(v, "v")  # raises: it is no array
        return recorder_of(q).mix(Given(q, k, rules, engine), v)
    call = describe_whole(q, k, v, rules)
    chosen = engines.chosen(call.problem, engine)
    output = native.output(call.problem, *call.given) if chosen is native and call.given is not None else None
    if output is not None:
        return output
    check_room(call.problem, _OUTPUT, call.d_v)
    return call.give(chosen.rows(call, _OUTPUT)["output"])


def recorder_of(q: Any) -> ModuleType:
    """The module that computes where `graphed` says yes: as PyTorch's graph has it, or each rank's part of DTensors."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None and isinstance(q, kind):
        from clearhead.ops import torch_sharded

        return torch_sharded
    from clearhead.ops import torch_recorded

    return torch_recorded


@with_options
def plan(q: Any, k: Any, v: Any = None, *, engine: str | None = None, **rules: Unpack[Rules]) -> engines.Plan:
    """Which engine `attention` takes for these inputs, and why each faster one cannot run; nothing is computed.

    Parameters and errors as `attention`; v may be left out. Returns a Plan: `engine` is the chosen engine's name,
    `reasons` maps the name of each engine passed over to a list of sentences, and `experimental` says why the chosen
    engine is called so, "" where it is not. It prints as one line for each. O(1) in the lengths, apart from reading the
    rules' own arrays.

    >>> import numpy as np, clearhead as ch
    >>> print(ch.plan(np.eye(2), np.eye(2), engine="portable"))
    engine: portable
    """
    with ungraphed():
        return engines.choose(describe(q, k, v, rules).problem, engine)
