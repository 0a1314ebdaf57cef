"""The table of statistics: every list of them agrees, and an undeclared statistic is refused by name."""

from collections.abc import Iterator
from dataclasses import fields, make_dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import engines
from clearhead.core import observations
from clearhead.core.call import describe
from clearhead.core.statistics import (
    PER_KEY,
    PER_QUERY,
    STATISTICS,
    Answers,
    Asked,
    AskedEffects,
    Matrix,
    Statistic,
    Wanted,
    Watched,
    arrays_of,
    askable,
    listed,
)
from clearhead.derivatives import backward
from clearhead.engines import native, portable
from clearhead.errors import DerivativeError, EngineError, SelectionError, UnknownNameError
from clearhead.ops.observable import Observable
from clearhead.view.answers import answer
from seeds import fresh

NAME = "made_up"


def arrays() -> tuple[Any, Any, Any]:
    rng = fresh()
    q, k, v = (rng.standard_normal((2, 3, 70, 4)).astype(np.float32) for _ in range(3))
    return q, k, v


@pytest.fixture(params=[(PER_QUERY, "rows", "weighed"), (PER_KEY, "columns", None)], ids=["rows", "columns"])
def want(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wanted]:
    """A request for a statistic that the table has and nothing computes."""
    axes, computed, over_keys = request.param
    over_queries = "after" if computed == "rows" else "added"
    made_up = Statistic(axes, "flag", computed, over_keys, over_queries, "row", "of a test")
    monkeypatch.setitem(STATISTICS, NAME, made_up)
    more = make_dataclass("More", [(NAME, bool, False)], bases=(Wanted,), frozen=True, eq=False)
    monkeypatch.setattr(observations, "Wanted", more)
    return more(**{NAME: True})


def test_every_list_of_statistics_equals_the_table():
    assert [field.name for field in fields(Answers)] == [
        array for name in STATISTICS for array in (arrays_of(name) if name == "logsumexp" else (name,))
    ]
    assert {field.name for field in fields(Wanted)} == {*STATISTICS, "of", "order", "keep_float32"}
    assert set(Asked.__annotations__) == set(askable()) == {n for n in vars(Observable) if not n.startswith("_")}
    assert set(Watched.__annotations__) == set(askable()) - {"logsumexp", "groups"}
    assert set(AskedEffects.__annotations__) == set(askable("effects")) <= {*vars(ch.EffectMatrix)}
    assert {name for name in listed() if STATISTICS[name].over_keys} == set(listed(computed="rows"))
    assert {*listed(), *listed("effects")} == {*STATISTICS}


def test_help_lists_the_statistics():
    words = ch.AttentionMatrix.observe.__doc__
    assert words
    for name in askable():
        assert f"\n        {name}=" in words
        assert STATISTICS[name].definition in words


@pytest.mark.parametrize("engine", engines.NAMES)
def test_engines_compute_every_statistic_of_the_table(engine: str):
    declared = engines.get(engine).STATISTICS
    every = {*listed()} - {"groups"} if engine == "triton" else {*STATISTICS}
    assert declared in (every, set()), "an engine without its compiler computes nothing"


@pytest.mark.parametrize("engine", engines.NAMES)
def test_an_engine_refuses_an_undeclared_statistic_by_name(engine: str, want: Wanted):
    q, k, v = arrays()
    inputs, run = describe(q, k, None, {}), engines.get(engine)
    if run.reasons_not(inputs.problem):
        pytest.skip(f"{engine} does not run here")
    lse = np.zeros((2, 3, 70), np.float32)
    with pytest.raises(EngineError, match=f"does not compute {NAME}"):
        run.rows(inputs, want) if want.rows() else run.columns(inputs, lse, want)
    matrix: Any = ch.AttentionMatrix(q, k, engine=engine)
    with pytest.raises(EngineError, match=f"{engine}: it does not compute {NAME}"):
        matrix.observe(v, entropy=True, **{NAME: True})


def test_where_no_engine_can_the_error_gives_the_reason_of_each(want: Wanted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CLEARHEAD_ENGINE", raising=False)
    q, k, _ = arrays()
    matrix: Any = ch.AttentionMatrix(q, k)
    with pytest.raises(EngineError) as error:
        matrix.observe(**{NAME: True})
    assert str(error.value).count(f"does not compute {NAME}") == len(engines.NAMES)


@pytest.mark.skipif(bool(native.missing()), reason="the compiled kernel is not here")
def test_another_engine_computes_a_statistic_that_one_lacks(monkeypatch: pytest.MonkeyPatch):
    q, k, v = arrays()
    matrix, forced = ch.AttentionMatrix(q, k), ch.AttentionMatrix(q, k, engine="native")
    monkeypatch.setattr(native, "STATISTICS", native.STATISTICS - {"entropy"})
    monkeypatch.delenv("CLEARHEAD_ENGINE", raising=False)
    expected = ch.AttentionMatrix(q, k, engine="portable").observe(v, entropy=True, received=True)
    np.testing.assert_array_equal(matrix.observe(v, entropy=True, received=True).entropy, expected.entropy)
    assert matrix.observe(max_logit=True).max_logit is not None
    assert engines.choose(describe(q, k, v, {}).problem, None, Wanted(entropy=True)).engine == "portable"
    with pytest.raises(EngineError, match="native: it does not compute entropy"):
        forced.observe(entropy=True)


def test_everything_that_declares_statistics_refuses_a_new_one_by_name(want: Wanted):
    q, k, _ = arrays()
    inputs, lse, asked = describe(q, k, None, {}), np.zeros((2, 3, 70), np.float32), {NAME: True}
    tensors = [torch.from_numpy(x) for x in (q, k)]
    whole: Any = ch.AttentionMatrix(*(x.clone().requires_grad_() for x in tensors))
    watching: Any = ch.watch
    with pytest.raises(EngineError, match=f"does not compute {NAME}"):
        whole.observe(**asked)
    with pytest.raises(DerivativeError, match=NAME):
        backward.gradients(portable, inputs, {"largest": lse, "log_sum": lse}, {NAME: lse})
    with pytest.raises(UnknownNameError, match=f"unknown statistic `{NAME}`"), watching(None, **asked):
        pass
    with pytest.raises(SelectionError, match=f"'{NAME}' cannot be asked for"):
        answer(NAME, {}, [])


def test_no_two_statistics_share_an_array_name():
    for of in get_args(Matrix):
        names = [array for name in listed(of) for array in arrays_of(name, of)]
        assert len(names) == len(set(names))
