"""Mistakes in the scores: what is multiplied with what, and the scale."""

from collections.abc import Iterable

from clearhead.diagnosing.mistakes.base import Mistake, always, square, when
from clearhead.diagnosing.recipe import Change, Inputs


def _scales(*others: float) -> Iterable[Change]:
    return [{"scale": other} for other in others]


def _other(given: Inputs, scale: float) -> Iterable[Change]:
    """Only where it is another number."""
    return _scales(scale) if abs(scale - given.problem.scale) > 1e-9 * abs(scale) else ()


def _d_v(given: Inputs) -> int:
    return given.theirs.shape[-1] if given.v is None else given.v.shape[-1]


SCORES = (
    Mistake(
        "no scale",
        lambda given: _other(given, 1.0),
        ("it does not scale the scores: the division by √d_k is missing", "没有缩放分数：缺少除以 √d_k"),
        ("scores = q @ k.T / sqrt(d_k)", "scores = q @ k.T / sqrt(d_k)"),
        ("a scale other than 1 (d_k > 1)", "缩放系数不为 1（d_k > 1）"),
    ),
    Mistake(
        "scale 1/d_k",
        lambda given: _other(given, 1 / given.problem.d_k),
        ("it divides by d_k, not by √d_k", "它除以 d_k，而不是 √d_k"),
        ("scale = d_k ** -0.5", "scale = d_k ** -0.5"),
        ("d_k > 1", "d_k > 1"),
    ),
    Mistake(
        "transpose missing",
        when(lambda given: given.problem.keys == given.problem.d_k, {"product": "q·k"}),
        ("it multiplies Q·K, not Q·Kᵀ: K is not transposed", "它算的是 Q·K 而不是 Q·Kᵀ：K 没有转置"),
        ("scores = q @ k.swapaxes(-1, -2)", "scores = q @ k.swapaxes(-1, -2)"),
        ("a K that is not symmetric; with as many keys as d_k it runs without an error", "K 不对称；键的个数等于 d_k 时不会报错"),
    ),
    Mistake(
        "q and k swapped",
        when(square, {"product": "k·qᵀ"}),
        ("it multiplies K·Qᵀ, not Q·Kᵀ: queries and keys are swapped", "它算的是 K·Qᵀ 而不是 Q·Kᵀ：查询与键颠倒了"),
        ("scores = q @ k.swapaxes(-1, -2)", "scores = q @ k.swapaxes(-1, -2)"),
        ("queries that differ from the keys", "查询与键不同"),
    ),
)
SOFTMAX = (
    Mistake(
        "softmax over queries",
        always({"axis": "queries"}),
        ("its softmax runs over the queries: the columns sum to 1, not the rows", "它的 softmax 沿查询方向计算：每列之和为 1，而不是每行"),
        ("weights = softmax(scores, axis=-1)", "weights = softmax(scores, axis=-1)"),
        ("more than one query", "多于一个查询"),
    ),
)
