"""attention() and plan(): the fused call, and which engine it takes."""

from typing import Any, Unpack

from clearhead import engines
from clearhead.arrays import graphed, ungraphed
from clearhead.observations import Wanted, check_room
from clearhead.problem import Rules, describe, describe_whole

_OUTPUT = Wanted(output=True)


def attention(q: Any, k: Any, v: Any, *, engine: str | None = None, **rules: Unpack[Rules]) -> Any:
    """softmax(scale·q·kᵀ + …)·v, exactly; the weights are never stored.

    q             (…, heads, queries, d_k), or (queries, d_k); float64, float32, bfloat16 or float16
    k             (…, kv_heads, keys, d_k); heads is a multiple of kv_heads
    v             (…, kv_heads, keys, d_v)
    engine        run this engine or raise EngineError with its reasons; None chooses the fastest that can
    scale         default 1/√d_k
    softcap       c: scores become c·tanh(s/c)
    bias          float, broadcasts to (…, heads, queries, keys); -inf forbids
    alibi_slopes  (heads,): subtracts slope·|i - j|
    causal        key j ≤ query i + query_offset
    window        (left, right) keys around the query's position, either may be None
    mask          bool, broadcasts to (…, heads, queries, keys), True = may attend
    kv_lengths, query_lengths     (batch,): what lies beyond is padding
    query_segments, kv_segments   (batch, queries), (batch, keys): attend within the same segment only
    sinks         (heads,): an extra logit in each row's denominator
    query_offset  int or (batch,): the first query's position among the keys; 0 when queries = keys

    Returns (…, heads, queries, d_v) in q's dtype and kind. A row with nothing to attend to gives 0.
    Raises ShapeError, DtypeError, RuleError, UnknownNameError, EngineError, or SizeError where the output is larger
    than memory, before any work. PyTorch's tensors have derivatives of first order in reverse mode, by torch.func's
    grad, vjp, jacrev and vmap (a call for each place) too; a second one and forward mode raise DerivativeError.
    O(queries·keys·(d_k + d_v)) time, O(queries + keys) memory; forbidden blocks cost nothing.

    How exact: nothing is left out or approximated at any length; what remains is rounding. The root mean square error
    over a whole tensor, against float64, is at most 1.25 times that of PyTorch's fused kernel in the same dtype. That
    is said of tensors with many numbers: for a single query or element either of the two may be nearer to the truth,
    by chance and by more than that.
    Source: Vaswani et al. 2017, section 3.2.1; computed by online softmax (Milakov & Gimelshein 2018).

    >>> import numpy as np, clearhead as ch
    >>> ch.attention(np.eye(2), np.eye(2), np.array([[1.0, 0.0], [0.0, 1.0]])).round(3)
    array([[0.67, 0.33],
           [0.33, 0.67]])
    """
    if graphed(q, k, v, *rules.values()):
        from clearhead.torch_graph import Graph

        return Graph(q, k, rules, engine).observe(v, {}).output
    given, values = describe_whole(q, k, v, rules)
    check_room(given.problem, _OUTPUT, values.shape[-1])
    chosen = engines.get(engines.choose(given.problem, engine).engine)
    output = chosen.rows(given.problem, given.q, given.k, given.v, _OUTPUT)["output"]
    return given.restore(given.problem.restore(output))


def plan(q: Any, k: Any, v: Any = None, *, engine: str | None = None, **rules: Unpack[Rules]) -> engines.Plan:
    """Which engine `attention` takes for these inputs, and why each faster one can't; nothing is computed.

    Parameters and errors as `attention`. The result prints as a list of reasons.

    >>> import numpy as np, clearhead as ch
    >>> print(ch.plan(np.eye(2), np.eye(2), engine="portable"))
    engine: portable
    """
    with ungraphed():
        return engines.choose(describe(q, k, v, rules).problem, engine)
