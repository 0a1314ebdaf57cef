"""The tables of score rules and of statistics: every list agrees with them, and what is in none is refused by name."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead import engines
from clearhead.core import definition, observations, visibility
from clearhead.core.axes import Array
from clearhead.core.call import Given, describe
from clearhead.core.problem import Problem
from clearhead.core.rules import FIELDS, RULES, Rule, Rules
from clearhead.core.statistics import (
    PER_KEY,
    PER_QUERY,
    STATISTICS,
    Asked,
    AskedEffects,
    Statistic,
    Wanted,
    Watched,
    arrays_of,
    askable,
    listed,
)
from clearhead.derivatives import backward, function, operator
from clearhead.derivatives.arguments import read
from clearhead.diagnosing import recipe
from clearhead.engines import native
from clearhead.errors import DerivativeError, EngineError, RuleError, SelectionError, UnknownNameError
from clearhead.view import long as page
from clearhead.view.answers import answer
from problems import Case, cases, every_rule, examples
from seeds import fresh

ATTENTION = Path(__file__).parents[1] / "page" / "src" / "attention.js"
SHAPES = ("prefix", "batch", "heads", "kv_heads", "d_k", "dtype", "device", "library", "rows", "cols")
KEPT = {"described"}  # made of the others when it is first asked for
SIZES = {"batch": 3, "heads": 4, "queries": 5, "keys": 7, "query_spans": 6, "key_spans": 8}
KNOWING = {  # everything that declares its supported rules, except PyTorch's kernels, which support few
    **{name: engines.get(name) for name in engines.NAMES},
    "definition": definition,
    "page": page,
    "diagnose": recipe,
}


def arrays() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((3, 4, 5, 6)), rng.standard_normal((3, 2, 7, 6)), rng.standard_normal((3, 2, 7, 6))


def test_table_keywords_and_problem_name_the_same_rules():
    assert list(RULES) == list(Rules.__annotations__) == list(every_rule())
    assert {field for rule in RULES.values() for field in rule.fields} == FIELDS.keys()
    assert {field.name for field in fields(Problem)} - FIELDS.keys() - KEPT == {*SHAPES}


def test_values_lie_along_the_tables_axes_and_are_in_use():
    problem = describe(*arrays(), every_rule()).problem
    for field, axes in FIELDS.items():
        assert np.shape(getattr(problem, field)) == tuple(SIZES[axis] for axis in axes) or not axes, field
    assert problem.active_rules() == list(RULES)
    plain = describe(*arrays()[:2], None, {"causal": False, "window": (None, None), "mask": None}).problem
    assert plain.active_rules() == ["scale", "query_offset"]  # every problem has a scale


@pytest.mark.parametrize("name", KNOWING)
def test_each_declared_set_of_rules_equals_the_table(name: str):
    """Each of these supports every rule today; a new rule is refused until it is declared."""
    assert RULES.keys() == KNOWING[name].RULES


# ── a new rule that nothing supports yet ──


@dataclass(frozen=True, eq=False, slots=True)
class Wider(Problem):
    """A problem with one more rule."""

    made_up: Array | None = None  # (heads,)


NEW: Any = {"made_up": np.ones(4)}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Problem:
    """The table has a new rule, and a problem uses it."""
    monkeypatch.setitem(RULES, "made_up", Rule(lambda _, value, *__: value, {"made_up": ("heads",)}))
    monkeypatch.setitem(FIELDS, "made_up", ("heads",))
    monkeypatch.setattr("clearhead.core.problem.Problem", Wider)
    return describe(*arrays(), NEW).problem


@pytest.mark.parametrize("name", engines.NAMES)
def test_every_engine_refuses_a_new_rule_by_name(made_up: Problem, name: str):
    sentence = f"the {name} engine has no rule `made_up`."
    assert sentence in engines.get(name).reasons_not(made_up)
    assert sentence not in engines.get(name).reasons_not(describe(*arrays(), {}).problem)
    with pytest.raises(EngineError, match=re.escape(sentence)):
        ch.attention(*arrays(), engine=name, **NEW)


def test_no_engine_is_chosen_for_a_new_rule(made_up: Problem):
    with pytest.raises(EngineError, match=r"native: .*`made_up`.*portable: .*`made_up`.*triton: .*`made_up`"):
        engines.choose(made_up)


def tensors() -> list[torch.Tensor]:
    return [torch.tensor(x) for x in arrays()]


def watched() -> None:
    from clearhead.hf.attending import attend

    attend(torch.nn.Module(), *tensors(), None, **NEW)


REFUSING: dict[str, Callable[[], Any]] = {
    "PyTorch's graph has no rule `made_up`.": lambda: ch.attention(*(x.to("meta") for x in tensors()), **NEW),
    "the page has no rule `made_up`.": lambda: page.packed(describe(*arrays(), NEW).problem),
    "the definition has no rule `made_up`.": lambda: ch.trace(*arrays(), **NEW),
    "ch.diagnose has no rule `made_up`.": lambda: ch.diagnose(*arrays(), np.zeros((3, 4, 5, 6)), **NEW),
    "the model passes `made_up` to its attention": watched,
}


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("sentence", REFUSING)
def test_all_that_declares_rules_refuses_a_new_one_by_name(sentence: str):
    with pytest.raises(RuleError, match=re.escape(sentence)):
        REFUSING[sentence]()


def test_the_operator_passes_on_every_rule(monkeypatch: pytest.MonkeyPatch):
    q, k, v = tensors()
    seen: list[Any] = []
    monkeypatch.setattr(function, "describe", lambda *inputs: seen.append(inputs[3]) or describe(*inputs))
    task, x = read(Given(q, k, every_rule()), v)
    operator.observe(task, x)
    assert list(seen[0]) == list(RULES)


def test_the_page_reads_every_declared_rule():
    text = ATTENTION.read_text(encoding="utf-8")
    text = text[text.index("export function rulesOf(") :]
    for field in (field for name in page.RULES for field in RULES[name].fields):
        assert re.search(rf'\brules\.{field}\b|"{field}"', text), field


RANGED = ("causal", "window", "kv_lengths", "query_lengths", "query_offset")  # rules by which blocks can be skipped


def draw_part(data: st.DataObject, case: Case) -> tuple[Problem, Array]:
    """Some queries and keys, with steps of either sign, and the visibility among them."""
    rows, cols = (range(n)[data.draw(st.slices(n))] for n in (case.problem.queries, case.problem.keys))
    dense = visibility.dense(case.problem)[:, :, list(rows)][..., list(cols)]
    return case.problem.take(queries=rows, keys=cols), dense


@examples(3)
@given(case=cases(rules=RANGED, most=400), data=st.data())
def test_spans_are_as_short_as_possible(case: Case, data: st.DataObject):
    """For one query the span is exactly what it sees."""
    part, dense = draw_part(data, case)
    for batch in range(part.batch):
        for i in range(part.queries):
            keys = visibility.key_span(part, batch, slice(i, i + 1))
            np.testing.assert_array_equal(np.flatnonzero(dense[batch, 0, i]), np.arange(part.keys)[keys])


NAME = "made_up"


def narrow_arrays() -> tuple[Any, Any, Any]:
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
    assert [field.name for field in fields(ch.Observation)] == [
        *(array for name in STATISTICS for array in (arrays_of(name) if name == "logsumexp" else (name,))),
        *("queries", "keys"),
    ]
    assert {field.name for field in fields(Wanted)} == {*STATISTICS, "of", "keep_float32"}
    assert set(Asked.__annotations__) == set(askable()) <= {*dir(ch.AttentionMatrix)}
    assert set(Watched.__annotations__) == set(askable()) - {"logsumexp", "groups"}
    assert set(AskedEffects.__annotations__) == set(askable("effects")) <= {*dir(ch.EffectMatrix)}
    assert {name for name in listed() if STATISTICS[name].over_keys} == set(listed(computed="rows"))
    assert {*listed(), *listed("effects")} == {*STATISTICS}


@pytest.mark.parametrize("engine", engines.NAMES)
def test_engines_compute_every_statistic_of_the_table(engine: str):
    declared = engines.get(engine).STATISTICS
    every = {*listed()} - {"groups", "image"} if engine == "triton" else {*STATISTICS}
    assert declared in (every, set()), "an engine without its compiler computes nothing"


@pytest.mark.parametrize("engine", engines.NAMES)
def test_an_engine_refuses_an_undeclared_statistic_by_name(engine: str, want: Wanted):
    q, k, v = narrow_arrays()
    inputs, run = describe(q, k, None, {}), engines.get(engine)
    if run.reasons_not(inputs.problem):
        pytest.skip(f"{engine} does not run here")
    lse = np.zeros((2, 3, 70), np.float32)
    with pytest.raises(EngineError, match=f"does not compute {NAME}"):
        run.rows(inputs, want) if want.rows() else run.columns(inputs, lse, want)
    matrix: Any = ch.AttentionMatrix(q, k, engine=engine)
    with pytest.raises(EngineError, match=f"{engine}: it does not compute {NAME}"):
        matrix.observe(v, entropy=True, **{NAME: True})


@pytest.mark.skipif(bool(native.missing()), reason="the compiled kernel is not here")
def test_another_engine_computes_a_statistic_that_one_lacks(monkeypatch: pytest.MonkeyPatch):
    q, k, v = narrow_arrays()
    matrix, forced = ch.AttentionMatrix(q, k), ch.AttentionMatrix(q, k, engine="native")
    monkeypatch.setattr(native, "STATISTICS", native.STATISTICS - {"entropy"})
    monkeypatch.delenv("CLEARHEAD_ENGINE", raising=False)
    expected = ch.AttentionMatrix(q, k, engine="portable").observe(v, entropy=True, received=True)
    np.testing.assert_array_equal(matrix.observe(v, entropy=True, received=True).entropy, expected.entropy)
    assert matrix.observe(max_logit=True).max_logit is not None
    assert engines.choose(describe(q, k, v, {}).problem, None, Wanted(entropy=True)).engine == "portable"
    with pytest.raises(EngineError, match="native: it does not compute entropy"):
        forced.observe(entropy=True)


def test_all_that_declares_statistics_refuses_a_new_one(want: Wanted):
    q, k, _ = narrow_arrays()
    asked = {NAME: True}
    tensors = [torch.from_numpy(x) for x in (q, k)]
    whole: Any = ch.AttentionMatrix(*(x.clone().requires_grad_() for x in tensors))
    watching: Any = ch.watch
    with pytest.raises(EngineError, match=f"does not compute {NAME}"):
        whole.observe(**asked)
    with pytest.raises(DerivativeError, match=NAME):
        backward.check_derivatives({NAME: None})
    with pytest.raises(UnknownNameError, match=f"unknown statistic `{NAME}`"), watching(None, **asked):
        pass
    with pytest.raises(SelectionError, match=f"there is no request '{NAME}'"):
        answer(NAME, {}, [])
