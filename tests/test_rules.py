"""The table of score rules: everything that lists rules agrees with it, and refuses unknown rules by name."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead import engines
from clearhead.core import definition, rules, visibility
from clearhead.core.axes import Array
from clearhead.core.block import Place, block_of
from clearhead.core.call import describe
from clearhead.core.problem import Problem
from clearhead.core.rules import FIELDS, RULES, Rule, Rules, flat
from clearhead.diagnosing import recipe
from clearhead.engines import native_calls
from clearhead.errors import EngineError, RuleError
from clearhead.ops import torch_arguments, torch_graph
from clearhead.view import packing
from problems import Case, cases, every_rule, examples

ATTENTION = Path(__file__).parents[1] / "page" / "src" / "attention.js"
SHAPES = ("prefix", "batch", "heads", "kv_heads", "d_k", "dtype", "device", "library", "num_threads", "rows", "cols")
SIZES = {"batch": 3, "heads": 4, "queries": 5, "keys": 7, "query_spans": 6, "key_spans": 8}
KNOWING = {  # everything that declares its supported rules, except PyTorch's kernels, which support few
    **{name: engines.get(name) for name in engines.NAMES},
    "definition": definition,
    "operators": torch_arguments,
    "page": packing,
    "diagnose": recipe,
}


def arrays() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((3, 4, 5, 6)), rng.standard_normal((3, 2, 7, 6)), rng.standard_normal((3, 2, 7, 6))


def test_the_table_the_keywords_and_the_problem_name_the_same_rules():
    assert list(RULES) == list(Rules.__annotations__) == list(every_rule())
    assert {field for rule in RULES.values() for field in rule.fields} == FIELDS.keys()
    assert {field.name for field in fields(Problem)} - FIELDS.keys() == {*SHAPES}


def test_values_lie_along_the_axes_that_the_table_says():
    problem = describe(*arrays(), every_rule()).problem
    for field, axes in FIELDS.items():
        assert np.shape(getattr(problem, field)) == tuple(SIZES[axis] for axis in axes) or not axes, field


def test_rules_are_in_use_when_they_are_given():
    assert describe(*arrays(), every_rule()).problem.active_rules() == list(RULES)
    plain = describe(*arrays()[:2], None, {"causal": False, "window": (None, None), "mask": None}).problem
    assert plain.active_rules() == ["scale", "query_offset"]  # every problem has a scale


@pytest.mark.parametrize("name", KNOWING)
def test_each_declared_set_of_rules_equals_the_table(name: str):
    """Each of these supports every rule today; a new rule is refused until it is declared."""
    assert RULES.keys() == KNOWING[name].RULES


def test_a_part_takes_every_rule_along_its_axes():
    problem = describe(*arrays(), every_rule()).problem
    chosen: dict[str, Any] = {"queries": range(4, -1, -2), "keys": range(1, 6), "batch": np.array([2, 0])}
    chosen["heads"] = range(1, 3)
    everything = {axis: range(SIZES[axis]) for axis in ("query_spans", "key_spans")}
    part = problem.take(chosen["queries"], chosen["keys"], chosen["batch"], chosen["heads"])
    for field, axes in FIELDS.items():
        whole = np.asarray(getattr(problem, field))
        index = np.ix_(*(list({**everything, **chosen}[axis]) for axis in axes))
        np.testing.assert_array_equal(getattr(part, field), whole[index] if axes else whole, err_msg=field)
    assert part.shape == (2, 2, 3, 5)
    assert (part.batch, part.heads, part.kv_heads, part.rows, part.cols) == (2, 2, 2, range(4, -1, -2), range(1, 6))
    assert problem.take(batches=np.array([1])).kv_heads == 2


def test_a_part_keeps_axes_of_length_one():
    shared = {"mask": np.ones((1, 1, 5, 7), bool), "sinks": np.arange(4), "scale": 0.5}
    taken = rules.take(shared, {"batch": np.array([2]), "heads": [3, 1], "queries": range(2)})
    assert taken["mask"].shape == (1, 1, 2, 7)
    assert (taken["sinks"].tolist(), taken["scale"]) == ([3, 1], 0.5)
    assert rules.take(shared, {"batch": range(0)})["mask"].shape == (0, 1, 5, 7)


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


def tensors(*, grad: bool = False) -> list[torch.Tensor]:
    return [torch.tensor(x, requires_grad=grad) for x in arrays()]


def watched() -> None:
    from clearhead.layers.attending import attend

    attend(torch.nn.Module(), *tensors(), None, **NEW)


REFUSING: dict[str, Callable[[], Any]] = {
    "PyTorch's graph has no rule `made_up`.": lambda: ch.attention(*tensors(grad=True), **NEW),
    "the page has no rule `made_up`.": lambda: packing.packed(describe(*arrays(), NEW).problem),
    "the definition has no rule `made_up`.": lambda: ch.trace(*arrays(), **NEW),
    "ch.diagnose has no rule `made_up`.": lambda: ch.diagnose(*arrays(), np.zeros((3, 4, 5, 6)), **NEW),
    "the model passes `made_up` to its attention": watched,
}


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("sentence", REFUSING)
def test_everything_that_declares_rules_refuses_a_new_rule_by_name(sentence: str):
    with pytest.raises(RuleError, match=re.escape(sentence)):
        REFUSING[sentence]()


# ── a declared rule that a binding or operator forgets to pass on ──


def test_the_binding_refuses_a_name_that_it_does_not_know(made_up: Problem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native_calls, "RULES", native_calls.RULES | {"made_up"})
    with pytest.raises(TypeError, match="made_up"):
        native_calls._describe(made_up)


@pytest.mark.parametrize("name", ["sinks", "scale", "left", "mask"])
def test_the_binding_refuses_a_call_that_lacks_a_rule(name: str, monkeypatch: pytest.MonkeyPatch):
    inputs: dict[str, Any] = {}

    class Recorder:
        @staticmethod
        def describe(**named: Any) -> None:
            inputs.update(named)

    with monkeypatch.context() as patch:
        patch.setattr(native_calls, "kernel", Recorder)
        native_calls._describe(describe(*arrays(), every_rule()).problem)
    native_calls.kernel.describe(**inputs)
    del inputs[name]
    with pytest.raises(TypeError, match="incompatible function arguments"):
        native_calls.kernel.describe(**inputs)


@pytest.mark.usefixtures("made_up")
def test_the_operators_refuse_a_rule_that_they_do_not_pass_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_graph, "RULES", torch_graph.RULES | {"made_up"})
    with pytest.raises(TypeError, match="made_up"):
        ch.attention(*tensors(grad=True), **NEW)


def test_the_operators_pass_on_every_rule_they_declare():
    schema = torch.ops.clearhead.observe.default._schema
    names = [argument.name for argument in schema.arguments[3 : 3 + len(torch_arguments.Settings._fields)]]
    assert names == list(torch_arguments.Settings._fields)


def test_the_page_reads_every_declared_rule():
    text = ATTENTION.read_text(encoding="utf-8")
    text = text[text.index("export function rulesOf(") :]
    for field in (field for name in packing.RULES for field in RULES[name].fields):
        assert re.search(rf'\brules\.{field}\b|"{field}"', text), field


def test_a_list_of_spans_that_is_too_long_is_not_copied():
    rules = {"spans": [0.5] * 10**6}
    assert flat(rules) is rules


RANGED = ("causal", "window", "kv_lengths", "query_lengths", "query_offset")  # rules by which blocks can be skipped


def draw_part(data: st.DataObject, case: Case) -> tuple[Problem, Array]:
    """Some queries and keys, with steps of either sign, and the visibility among them."""
    rows, cols = (range(n)[data.draw(st.slices(n))] for n in (case.problem.queries, case.problem.keys))
    dense = visibility.dense(case.problem)[:, :, list(rows)][..., list(cols)]
    return case.problem.take(rows, cols), dense


def draw_block(data: st.DataObject, size: int) -> slice:
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))
    return slice(start, stop)


@given(case=cases(most=2000), data=st.data())
def test_a_part_has_the_same_visibility_as_in_the_whole_problem(case: Case, data: st.DataObject):
    part, dense = draw_part(data, case)
    np.testing.assert_array_equal(visibility.dense(part), dense)


@given(case=cases(most=2000), data=st.data())
def test_the_visibility_of_a_block_is_its_part_of_the_whole(case: Case, data: st.DataObject):
    part, dense = draw_part(data, case)
    rows, cols = draw_block(data, part.queries), draw_block(data, part.keys)
    for batch, head in np.ndindex(dense.shape[:2]):
        tile, truth = visibility.tile(part, batch, head, rows, cols), dense[batch, head, rows, cols]
        if isinstance(tile, bool):
            assert (truth == tile).all()
        else:
            np.testing.assert_array_equal(tile, truth)


@given(case=cases(most=2000), data=st.data())
def test_no_key_outside_the_spans_is_visible(case: Case, data: st.DataObject):
    part, dense = draw_part(data, case)
    rows = draw_block(data, part.queries)
    for batch in range(part.batch):
        assert outside(dense[batch, :, rows], visibility.key_span(part, batch, rows), -1).sum() == 0


@examples(3)
@given(case=cases(rules=RANGED, most=400), data=st.data())
def test_spans_are_as_short_as_possible(case: Case, data: st.DataObject):
    """For one query the span is exactly what it sees."""
    part, dense = draw_part(data, case)
    for batch in range(part.batch):
        for i in range(part.queries):
            keys = visibility.key_span(part, batch, slice(i, i + 1))
            np.testing.assert_array_equal(np.flatnonzero(dense[batch, 0, i]), np.arange(part.keys)[keys])


def outside(seen: Array, span: slice, axis: int) -> Array:
    """What is visible outside a span."""
    inside: Any = np.zeros(seen.shape[axis], bool)
    inside[span] = True
    return seen & ~(inside if axis == -1 else inside[:, None])


@given(case=cases(most=2000), data=st.data())
def test_positions_count_in_the_whole_matrix(case: Case, data: st.DataObject):
    part, _ = draw_part(data, case)
    offset = np.broadcast_to(np.asarray(case.rules.get("query_offset", 0)), case.problem.prefix[:-1]).reshape(-1)
    for batch in range(part.batch):
        place = visibility.positions(part, batch, slice(0, part.queries))
        np.testing.assert_array_equal(place, np.array(part.rows, int) + offset[batch])
        block = block_of(part, Place(slice(batch, batch + 1), slice(0, 1), slice(0, part.queries), slice(0, part.keys)))
        far = np.broadcast_to(abs(block.ahead), (1, 1, part.queries, part.keys))[0, 0]
        np.testing.assert_array_equal(far, np.abs(place[:, None] - np.array(part.cols, int)))
