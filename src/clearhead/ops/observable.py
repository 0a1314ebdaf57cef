"""What is observed of attention's weights, one method each."""

from typing import TYPE_CHECKING, Any, Unpack, cast

from clearhead.core.statistics import Asked, Top
from clearhead.ops.observation import Observation


class Observable:
    """One method for each statistic; each asks `observe` for it alone.

    Answers have the statistics' dtype (float32, or float64 for float64) and are the kind of array that q is. Ask
    `observe` for several at once: they share the passes over the keys, O(queries·keys·d_k) time each, with memory for
    the answers only. Every method raises SizeError where its answer is larger than memory, and EngineError where the
    engine does not compute it.
    """

    if TYPE_CHECKING:

        def observe(self, v: Any = None, *, queries: slice = slice(None), **asked: Unpack[Asked]) -> Observation:
            """Everything asked for, together."""

    def logsumexp(self) -> Any:
        """L_i = ln(Σ_j exp(s_ij) + exp(sink)), (…, heads, queries), by the natural logarithm; s_ij are the logits.

        -inf where a query may attend to no key. Computed once and kept.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).logsumexp().round(2)
        array([0.  , 0.69])
        """
        return self.observe(logsumexp=True).logsumexp

    def max_logit(self) -> Any:
        """The largest logit of each query, max_j s_ij over the keys it may attend to, (…, heads, queries).

        The logit is what softmax is taken of: after scale, softcap, bias and ALiBi, and without sinks. -inf where a
        query may attend to no key.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).max_logit()
        array([0., 0.])
        """
        return self.observe(max_logit=True).max_logit

    def entropy(self) -> Any:
        """-Σ_j a_ij ln a_ij in nats, (…, heads, queries); 0 where a query may attend to no key.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).entropy().round(2)
        array([0.  , 0.69])
        """
        return self.observe(entropy=True).entropy

    def distance(self) -> Any:
        """Σ_j a_ij·|position of query i - j|, the mean distance attended over, in tokens, (…, heads, queries).

        The position of query i is i + query_offset. 0 where a query may attend to no key.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).distance()
        array([0. , 0.5])
        """
        return self.observe(distance=True).distance

    def diagonal(self) -> Any:
        """The weight that each query gives the key at its own position, (…, heads, queries); 0 where there is none.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).diagonal()
        array([1. , 0.5])
        """
        return self.observe(diagonal=True).diagonal

    def top(self, k: int) -> Top:
        """The k largest weights of each query and their keys, (…, heads, queries, k) each, largest first.

        Returns a Top of `weights` and `indices`, int64. Of equal weights the earlier key comes first; where fewer than
        k keys are visible, the rest is filled with weight 0 and index -1. Raises RuleError unless k is a positive
        integer, and what `observe` raises. O(queries·keys·d_k) time, O(queries·k) memory.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.eye(3), np.eye(3), causal=True).top(2).indices.tolist()
        [[0, -1], [1, 0], [2, 0]]
        """
        return cast("Top", self.observe(top=0 if k is None else k).top)  # None would ask for nothing

    def received(self) -> Any:
        """Σ_i a_ij, the sum of the weights that each key receives, (…, heads, keys).

        The accumulated attention score of H2O (Zhang et al. 2023).

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).received()
        array([1.5, 0.5])
        """
        return self.observe(received=True).received

    def peak(self) -> Any:
        """max_i a_ij, the largest weight that any query gives each key, (…, heads, keys); 0 where none may do so.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).peak()
        array([1. , 0.5])
        """
        return self.observe(peak=True).peak

    def image(self, height: int, width: int) -> Any:
        """The matrix as a picture, (…, heads, height, width): each pixel is the mean of the weights over its area.

        Its mean is the mean of the matrix. Raises RuleError unless both are whole numbers from 1 up.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).image(1, 1)
        array([[0.5]])
        """
        return self.observe(image=(height, width)).image

    def groups(self, query_groups: Any, key_groups: Any) -> Any:
        """Σ of a_ij between labelled spans, (…, heads, query groups, key groups).

        query_groups is (queries,) or (…, queries), key_groups (keys,) or (…, keys): whole numbers 0, 1, 2, …; a token
        whose label is below 0 belongs to no group. Raises DtypeError, ShapeError or RuleError for other labels.

        >>> import numpy as np, clearhead as ch
        >>> ch.AttentionMatrix(np.zeros((2, 4)), np.zeros((2, 4)), causal=True).groups([0, 0], [0, 1])
        array([[1.5, 0.5]])
        """
        return self.observe(groups=(query_groups, key_groups)).groups
