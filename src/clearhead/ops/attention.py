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
    bias          float, broadcasts to (…, heads, queries, keys); -inf forbids; finite numbers are clipped to ±2^127
    alibi_slopes  (heads,): subtracts slope·|i - j|
    spans         (query_spans, key_spans, table): adds table[query_spans[i], key_spans[j]], where -inf forbids. Labels
                  (batch, queries) or (queries,), and (batch, keys) or (keys,); a label below 0 adds nothing. The
                  table broadcasts to (…, heads, query_spans, key_spans)
    causal        True: query i attends to keys j ≤ i + query_offset only
    window        (left, right): how many keys before and after its position a query attends to, None for no limit
    mask          bool, broadcasts to (…, heads, queries, keys), True = may attend
    kv_lengths, query_lengths     (batch,): keys or queries beyond these lengths are padding
    query_segments, kv_segments   (batch, queries), (batch, keys): attend within the same segment only
    sinks         (heads,): an extra logit in each row's denominator
    query_offset  int or (batch,): the first query's position among the keys; 0 when queries = keys

    Returns (…, heads, queries, d_v) in q's dtype and kind. A row with nothing to attend to gives 0.
    Raises, before any work: ShapeError, DtypeError, RuleError or UnknownNameError for inputs that do not fit;
    EngineError when no engine, or not the one named, can run; SizeError when the output is larger than memory.
    PyTorch tensors have derivatives of every order and in forward mode, also through torch.func; vmap runs as a single
    call. The first derivative is fused; the others are recomputed in blocks, which takes longer.
    O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory; forbidden blocks cost nothing.

    With PyTorch's DTensors, each rank computes its shard, and the result is sharded as q is; where q is sharded over
    queries, k and v are all-gathered. Raises DtypeError for placements that do not fit q's, before anything is sent.

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
    problem = None if v is None else known(q, k, v, rules)
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
    """Return the module that computes where `graphed` is True: torch_sharded for DTensors, else torch_recorded."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None and isinstance(q, kind):
        from clearhead.ops import torch_sharded

        return torch_sharded
    from clearhead.ops import torch_recorded

    return torch_recorded


@with_options
def plan(q: Any, k: Any, v: Any = None, *, engine: str | None = None, **rules: Unpack[Rules]) -> engines.Plan:
    """Say which engine `attention` would choose and why each faster one cannot run, without computing anything.

    Parameters and errors as `attention`; v may be left out. Returns a Plan, which prints as a few lines:
    `engine` is the chosen engine's name, `reasons` maps the name of each engine passed over to a list of sentences, and
    `experimental` says why the chosen engine counts as experimental, or is "". O(1) in the lengths, apart from reading
    rules that are arrays.

    >>> import numpy as np, clearhead as ch
    >>> print(ch.plan(np.eye(2), np.eye(2), engine="portable"))
    engine: portable
    """
    with ungraphed():
        return engines.choose(describe(q, k, v, rules).problem, engine)
