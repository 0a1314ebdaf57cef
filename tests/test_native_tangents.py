"""The native engine's derivatives along a direction: the same bits always, and nothing from what nobody sees."""

from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from clearhead import engines
from clearhead.core.axes import Array
from clearhead.core.directions import Directions
from clearhead.core.problem import Inputs, describe
from clearhead.core.statistics import Groups, Wanted
from clearhead.engines.base import Kept, Upstream
from seeds import fresh, normal

native: Any = engines.get("native")
portable: Any = engines.get("portable")
pytestmark = pytest.mark.skipif(bool(native.missing()), reason=native.missing())
Named = dict[str, Array]
Rules = dict[str, Any]
BFLOAT16 = ml_dtypes.bfloat16


class Question:
    """All that an engine answers along one direction, of numbers drawn once: heads 4, kv_heads 2."""

    def __init__(
        self, n: int, m: int, rules: Rules | None = None, dtype: Any = np.float32, d: int = 20, batch: int = 2
    ) -> None:
        rng = fresh()
        make = partial(normal, dtype=dtype)
        self.q, self.k, self.v = make(batch, 4, n, d), make(batch, 2, m, d), make(batch, 2, m, d)
        self.rules = rules or {}
        self.along = Directions(make(batch, 4, n, d), make(batch, 2, m, d), make(batch, 2, m, d))
        if "bias" in self.rules:
            self.along = replace(self.along, bias=make(batch, 4, n, m))
        if "spans" in self.rules:
            self.along = replace(self.along, spans=make(batch, 4, *self.rules["spans"][2].shape[-2:]))
        if "sinks" in self.rules:
            self.along = replace(self.along, sinks=rng.standard_normal(4))
        self.g, self.g_moved = make(batch, 4, n, d), make(batch, 4, n, d)
        self.rows = [*normal(6, batch, 4, n, dtype=np.float64 if dtype == np.float64 else np.float32)]
        self.groups = Groups(rng.integers(-1, 3, (batch, n)), rng.integers(-1, 4, (batch, m)), (3, 4))

    def inputs(self) -> Inputs:
        return describe(self.q, self.k, self.v, self.rules).inputs

    def answers(self, engine: Any) -> Named:
        """Every answer, by a name of its own."""
        inputs, along = self.inputs(), self.along
        problem = inputs.problem
        want = Wanted(output=True, logsumexp=True, entropy=True, distance=True, diagonal=True)
        result = dict(engine.tangents(inputs, along, want))
        kept = Kept(result["logsumexp"], result["logsumexp_tangent"])
        again = engine.tangents(inputs, along, want, kept.logsumexp)
        known = engine.tangents(inputs, along, want, kept.logsumexp, result["output"])
        columns = Wanted(received=True, image=(3, 5), groups=self.groups)
        bias = (1, 4, problem.queries, problem.keys) if problem.bias is not None else None
        spans = None if problem.span_table is None else problem.span_table.shape
        rows, entropy, distance, diagonal, more, rows_moved = self.rows
        said = Upstream(rows, self.g, None, entropy, distance, diagonal, bias, spans)
        moving = Upstream(rows_moved, self.g_moved, None, more, None, rows, bias, spans)
        parts = {
            "again ": again,
            "known ": known,
            "columns ": engine.column_tangents(inputs, along, kept, columns),
            "gradient ": engine.gradient_tangents(inputs, along, kept, said, moving),
        }
        return result | {title + name: x for title, part in parts.items() for name, x in part.items()}


def spans_of(rng: np.random.Generator, n: int, m: int) -> tuple[Array, Array, Array]:
    table = rng.standard_normal((4, 3, 5))
    table[:, 0, 1] = -np.inf
    return rng.integers(-1, 3, n), rng.integers(-1, 5, m), table


def all_rules(n: int, m: int) -> Rules:
    rng = fresh()
    bias = rng.standard_normal((4, n, m))
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    return {
        "bias": bias, "spans": spans_of(rng, n, m), "sinks": rng.standard_normal(4), "softcap": 3.0,
        "causal": True, "query_offset": m - n,
    }  # fmt: skip


def close(result: Named, truth: Named) -> None:
    assert result.keys() == truth.keys()
    for name, x in truth.items():
        scale = np.abs(x[np.isfinite(x)]).max(initial=0) + 1e-3
        np.testing.assert_allclose(result[name], x, atol=1e-11 * scale, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("n", "m"), [(20, 600), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((2, 4500), (130, 2200)))]
)
def test_long_rows_equal_the_portable_engine(n: int, m: int):
    question = Question(n, m, all_rules(n, m), np.float64)
    close(question.answers(native), question.answers(portable))


@pytest.mark.parametrize("rules", ["few", "all"])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_results_have_the_bits_of_the_row_pass(rules: str, dtype: Any):
    question = Question(150, 300, all_rules(150, 300) if rules == "all" else {}, dtype)
    inputs, want = question.inputs(), Wanted(output=True, logsumexp=True, entropy=True, distance=True, diagonal=True)
    truth = native.rows(inputs, want)
    result = native.tangents(inputs, question.along, want)
    for name, x in truth.items():
        np.testing.assert_array_equal(result[name], x, err_msg=name)


def test_a_row_with_all_its_weight_on_one_key_has_an_output_that_stays():
    """The tangents of logits cancel there, which what is rounded of them would not."""
    question = Question(40, 1, dtype=BFLOAT16)
    question.along = replace(question.along, v=None)
    result = question.answers(native)
    logits = np.abs(result["logsumexp_tangent"]).max()
    assert np.abs(result["output_tangent"].astype(np.float64)).max() < 1e-5 * logits * np.abs(question.v).max()
