"""The GPU kernels' derivatives along a direction, in Triton's interpreter: tiles, slices, and NaN that nobody sees."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from clearhead.core.directions import Directions
from clearhead.core.problem import describe
from clearhead.core.statistics import Wanted
from clearhead.engines import portable, triton
from clearhead.engines.base import Kept, Upstream
from clearhead.engines.gpu import tensors as gpu
from seeds import fresh
from test_native_tangents import Question, all_rules, close, spans_of

SLOW = pytest.mark.long


def far(n: int, m: int) -> dict[str, Any]:
    """Rules that depend on positions and lengths, with empty rows."""
    return {
        "window": (20, 3), "query_offset": m - n, "kv_lengths": m - 7, "query_lengths": n - 9,
        "alibi_slopes": np.arange(4) / 9, "mask": fresh().random((n, m)) < 0.8,
        "query_segments": np.arange(n) // 30, "kv_segments": np.arange(m) // 30, "scale": np.arange(4) - 1.5,
    }  # fmt: skip


@SLOW
@pytest.mark.parametrize(("rules", "n", "m"), [("all", 3, 40), ("", 34, 70)])
def test_several_tiles_equal_the_portable_engine(rules: str, n: int, m: int):
    rules = rules or str(fresh().choice(["all", "far", "few"]))
    inputs = {"all": all_rules, "far": far, "few": lambda *_: {"scale": -0.3}}[rules](n, m)
    question = Question(n, m, inputs, np.float64, d=5, batch=1)
    close(question.answers(triton), question.answers(portable))


@pytest.mark.gate
@pytest.mark.parametrize("chunk", [0, pytest.param(16, marks=SLOW)])
def test_products_of_whole_rows_and_of_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch):
    """In float64, which compares exactly, also the whole rows that kernels read of halves; d is above two chunks."""
    sizes = gpu.sizes
    monkeypatch.setattr(gpu, "sizes", lambda *arguments: sizes(*arguments)._replace(CHUNK=chunk))
    n, m, rng = 5, 9, fresh()
    each: list[dict[str, Any]] = [{"softcap": 3.0}, {"causal": True, "query_offset": 4}, {"spans": spans_of(rng, n, m)}]
    rules = {name: x for place in rng.permutation(3)[:2] for name, x in each[place].items()}
    question = Question(n, m, rules, np.float64, d=37, batch=1)
    close(question.answers(triton), question.answers(portable))


@SLOW
def test_wide_values_are_processed_in_parts(monkeypatch: pytest.MonkeyPatch):
    question = Question(
        5, 20, {"causal": True, "query_offset": 12, "bias": fresh().standard_normal((5, 20))}, np.float64, batch=1
    )
    truth = question.answers(portable)
    monkeypatch.setattr(triton, "MOST_D", 8)
    close(question.answers(triton), truth)


@pytest.mark.gate
def test_values_wider_than_the_weights_and_results_of_one_side_alone():
    rng = fresh()
    q, k, v, g = (rng.standard_normal((1, heads, n, 4)) for heads, n in ((4, 5), (2, 9), (4, 9), (4, 5)))
    q, k, g = (x.astype(np.float32) for x in (q, k, g))
    operands = describe(q, k, None, {"sinks": np.ones(4)}).inputs._replace(v=v)
    along = Directions(q=g, v=rng.standard_normal(v.shape), sinks=rng.standard_normal(4))
    want = Wanted(output=True, entropy=True)
    result, truth = (engine.tangents(operands, along, want) for engine in (triton, portable))
    assert result["output_tangent"].dtype == truth["output_tangent"].dtype == np.float32
    kept = Kept(truth["logsumexp"], truth["logsumexp_tangent"])
    none, some = Upstream(kept.tangent), Upstream(kept.tangent, g, diagonal=kept.tangent)
    for inputs, moving in ((none, some), (some, none), (none, none)):
        said = replace(inputs, entropy=kept.tangent) if inputs is some else inputs
        pair = [engine.gradient_tangents(operands, along, kept, said, moving) for engine in (triton, portable)]
        assert pair[0].keys() == pair[1].keys()
        for name, x in pair[1].items():
            np.testing.assert_allclose(pair[0][name], x, 1e-4, 1e-5, err_msg=name)
    for name, x in truth.items():
        np.testing.assert_allclose(result[name], x, 1e-4, 1e-5, err_msg=name)


@pytest.mark.gate
def test_a_nan_reaches_only_the_groups_and_pixels_that_have_its_row():
    """One query is NaN; along a direction so are the tangents of its weights, with infinite tangents of another."""
    n, m = 6, 9
    question = Question(n, m, {"causal": True, "query_offset": 3}, np.float64, d=4)
    inputs, along = question.inputs(), question.along
    labels = np.broadcast_to(np.arange(n) // 2, (2, n)), np.broadcast_to(np.arange(m) // 3, (2, m))
    want = Wanted(image=(3, 3), groups=question.groups._replace(queries=labels[0], keys=labels[1], counts=(3, 3)))
    lse = portable.rows(inputs, Wanted(logsumexp=True))["logsumexp"]
    kept = Kept(lse, np.zeros_like(lse))
    spoilt, moved = inputs._replace(q=question.q.copy()), question.along.q.copy()
    spoilt.q[:, 1, 2], moved[:, 2, 5] = np.nan, np.inf
    for name, x in triton.column_tangents(spoilt, replace(along, q=moved), kept, want).items():
        truth = portable.column_tangents(inputs, along, kept, want)[name]
        check_spread(x, truth, {(1, 1), (2, 2)}, name)
    truth = portable.columns(inputs, lse, want)
    for name, x in triton.columns(spoilt, lse, want).items():
        check_spread(x, truth[name], {(1, 1)}, name)


def check_spread(x: Any, truth: Any, spoilt: set[tuple[int, int]], name: str) -> None:
    """Rows of `spoilt` (head, group of queries) are nonfinite for the first keys, all else is as in truth."""
    for head, row in np.ndindex(4, 3):
        if (head, row) in spoilt:
            assert not np.isfinite(x[:, head, row, 0]).any(), name
        else:
            np.testing.assert_allclose(
                x[:, head, row], truth[:, head, row], 1e-9, 1e-12, err_msg=f"{name} {head} {row}"
            )
