"""What every kernel takes besides the rules: arrays with their strides, a direction, and the sizes of a pass."""

from typing import Any, NamedTuple


class Strided(NamedTuple):
    """A tensor with four axes and its strides in elements, 0 along those that are broadcast."""

    tensor: Any
    batch: Any
    head: Any
    row: Any
    column: Any
    share: Any = 1  # how many query heads share one of its heads


class Operands(NamedTuple):
    """The arrays that a pass reads, each Strided or None where it has none; along a direction their tangents too."""

    q: Any
    k: Any
    v: Any = None
    g: Any = None  # (batch, heads, queries, d_v): the upstream gradient of the output, or what effects are about
    moved_q: Any = None
    moved_k: Any = None
    moved_v: Any = None
    moved_g: Any = None


class Direction(NamedTuple):
    """The tangents of the rules along a direction; None is zero."""

    bias: Any = None  # as in Rules
    table: Any = None
    sinks: Any = None
    end: Any = None  # a constant after the tuples, as in Rules


class There(NamedTuple):
    """Which arrays a side of the matrix has besides its x (q or k): its y (g or v), and the tangents of both."""

    y: Any = False
    moved_x: Any = False
    moved_y: Any = False


class Sizes(NamedTuple):
    """The sizes of a pass, and which arrays it reads; all but d_k and d_v are constants of the compiled kernel."""

    d_k: Any
    d_v: Any
    M: Any  # queries or keys whose results one program computes
    N: Any  # how many of the other side it reads at a time
    DK: Any  # d_k and d_v, padded to powers of two
    DV: Any
    WIDE: Any  # whether values are wider than DV, so that their products go through them DV columns at a time
    CHUNK: Any  # columns of q, k, v and g that a product reads at a time; 0: all, and they stay
    FLOAT: Any  # the dtype of sums
    PRECISION: Any  # of products of float32: "ieee", "tf32", or "tf32x3", whose errors are not much above float32's
    WARPS: Any  # of a program, and the stages in which its loops are pipelined
    STAGES: Any
    QUERIES: Any = There()
    KEYS: Any = There()
