"""What every kernel takes besides the rules: arrays with their strides, and the sizes of a pass."""

from typing import Any, NamedTuple


class Strided(NamedTuple):
    """A tensor with four axes and its strides in elements, 0 along those that are broadcast."""

    tensor: Any
    batch: Any
    head: Any
    row: Any
    column: Any
    share: Any = 1  # how many query heads share one of its heads


class Inputs(NamedTuple):
    """The arrays that a pass reads, each Strided, or None where it has none."""

    q: Any
    k: Any
    v: Any = None
    g: Any = None  # (batch, heads, queries, d_v): the upstream gradient of the output, or what Aᵀ is multiplied with
    end: Any = None  # a constant after the tuples, as in RuleArguments


class TileSizes(NamedTuple):
    """The sizes of a pass; all but d_k and d_v are constants of the compiled kernel."""

    d_k: Any
    d_v: Any
    M: Any  # queries or keys whose results one program computes
    N: Any  # how many of the other side it reads at a time
    DK: Any  # d_k and d_v, padded to powers of two
    DV: Any
    FLOAT: Any  # the dtype of sums
    PRECISION: Any  # of products of float32: "ieee", "tf32", or "tf32x3", whose errors are not much above float32's
    STAGES: Any  # in which its loops are pipelined
