"""Laws of attention that results obey for any inputs: of every pass on every engine, of the weights, and of bits."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

import clearhead as ch
from clearhead import engines
from clearhead.core.arrays import FLOATS, statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.engines import native, triton
from error_texts import passes_of
from passes import PASSES, RECOMPUTED, Answers, Question, each_unreached, nothing, unseen
from problems import INTERPRETED, Case, cases, examples, refused
from seeds import normal
from slack import assert_close

CPU = tuple(name for name in ("native", "portable") if name != "native" or not native.missing())


@dataclass(frozen=True)
class Run:
    """A pass on an engine."""

    over: str
    engine: str

    def __call__(self, question: Question) -> Answers:
        return PASSES[self.over][1](question, self.engine)

    def assert_same(self, actual: Array, expected: Array, name: str, *, rounding: bool = False) -> None:
        """The same bits; of what is recomputed, and of what may round, the same but for rounding."""
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        if rounding and actual.dtype.kind in "iu":
            return  # of nearly equal weights, either may come first
        if self.over not in RECOMPUTED and not rounding:
            np.testing.assert_array_equal(actual, expected, err_msg=name)
            return
        wide, finite = expected.astype(np.float64), np.isfinite(expected.astype(np.float64))
        near = 2e3 * float(ml_dtypes.finfo(expected.dtype).eps) * np.abs(np.where(finite, wide, 0)).max(initial=1)
        np.testing.assert_allclose(actual.astype(np.float64), wide, 0, near, err_msg=name)

    @property
    def rounds(self) -> bool:
        """May the last bits depend on how a problem is cut into blocks? On the compiled engine they do not."""
        return self.engine == "portable"


NONFINITE = st.sampled_from((np.nan, np.inf, -np.inf))


MOST = {"cuts": 3000, "second": 3000, "tangents": 6000}  # weights of a problem; of the other passes 20,000


def same(run: Run, actual: Answers, expected: Answers, *, rounding: bool = False) -> None:
    assert actual.keys() == expected.keys()
    for key, x in expected.items():
        run.assert_same(actual[key], x, str(key), rounding=rounding)


def partly_blind(question: Question) -> Question:
    """The same with a mask that hides every third query, and every fourth key."""
    mask = np.broadcast_to(question.case.rules.get("mask", True), question.case.problem.shape).copy()
    mask[..., ::3, :] = mask[..., 1::4] = False
    return replace(question, case=replace(question.case, rules={**question.case.rules, "mask": mask}))


def what_sees_nothing_is_zero(run: Run, question: Question, data: st.DataObject) -> None:
    """Also where it is no query, no key or nothing at all; the log-sum-exp and the largest logit are -inf then."""
    question = partly_blind(question)
    for (name, axis), x in run(question).items():
        if axis in ("queries", "keys"):
            by_head = ~question.visible.any(axis=-1 if axis == "queries" else -2)
            blind = by_head if x.shape[1] == by_head.shape[1] else unseen(question)[1]
            np.testing.assert_array_equal(x[blind], np.asarray(nothing(name), x.dtype), err_msg=name)
        if not question.visible.any() and axis != "queries":
            assert not x.any(), name


def unseen_numbers_change_no_bit(run: Run, question: Question, data: st.DataObject) -> None:
    """What belongs to queries that see nothing, and to keys that nobody sees, may be any number."""
    question = partly_blind(question)
    same(run, run(question.spoilt(*unseen(question), data.draw(NONFINITE))), run(question.contiguous()))


def a_nonfinite_number_reaches_only_what_sees_it(run: Run, question: Question, data: st.DataObject) -> None:
    """One key, or one query with its derivatives: all other rows and columns keep their bits."""
    problem = question.case.problem
    assume(problem.queries * problem.keys)
    queries = np.zeros((problem.batch, problem.heads, problem.queries), bool)
    keys = np.zeros((problem.batch, problem.kv_heads, problem.keys), bool)
    chosen = data.draw(st.sampled_from((queries, keys)))
    chosen[..., data.draw(st.integers(0, chosen.shape[-1] - 1))] = True
    dirty, clean = run(question.spoilt(queries, keys, data.draw(NONFINITE))), run(question.contiguous())
    for key, untouched in each_unreached(question, clean, queries, keys):
        run.assert_same(dirty[key][untouched], clean[key][untouched], str(key))


def neither_strides_nor_threads_nor_a_second_run_change_a_bit(
    run: Run, question: Question, data: st.DataObject
) -> None:
    first, before = run(question), ch.get_num_threads()
    try:
        for count in (1, data.draw(st.sampled_from((2, 3, 5)))):
            ch.set_num_threads(count)
            with threadpool_limits(count):
                same(run, run(question.contiguous()), first, rounding=run.rounds)
    finally:
        ch.set_num_threads(before)


def a_row_has_the_same_bits_whatever_the_others(run: Run, question: Question, data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, question.case.problem.queries)] * 2)))
    whole, part = run(question), run(question.of_queries(start, stop))
    for key, x in whole.items():
        if key[1] == "queries":
            run.assert_same(part[key], x[:, :, start:stop], str(key), rounding=run.rounds)


def a_batch_entry_alone_has_the_same_bits(run: Run, question: Question, data: st.DataObject) -> None:
    assume(question.case.q.ndim > 3 and question.case.q.shape[0])
    item, count = data.draw(st.integers(0, question.case.q.shape[0] - 1)), question.case.q.shape[0]
    whole, part = run(question), run(question.of_batch(item))
    for key, x in whole.items():
        if key[1] not in ("list", "labels"):
            each = len(x) // count
            run.assert_same(part[key], x[item * each : (item + 1) * each], str(key), rounding=run.rounds)


def what_is_added_to_all_logits_changes_nothing(run: Run, question: Question, data: st.DataObject) -> None:
    """But the largest logit. Logits are whole numbers here, so that the sums with a number far from 0 are exact."""
    case = question.case
    kept = {name: x for name, x in case.rules.items() if name not in ("softcap", "scale", "alibi_slopes")}
    rules = kept | {name: np.round(np.asarray(kept[name], np.float64)) for name in ("bias", "sinks") if name in kept}
    if "spans" in rules:
        rules["spans"] = (*rules["spans"][:2], np.round(np.asarray(rules["spans"][2], np.float64)))
    whole = {name: np.round(getattr(case, name).astype(np.float64)).astype(case.q.dtype) for name in "qk"}
    usual = statistics_dtype(case.q.dtype)
    far = data.draw(st.sampled_from((-1, 1))) * (2.0**48 if usual == np.float64 else 2.0**22)
    plain, moved = (
        replace(case, **whole, rules=rules | {"scale": 1.0, "bias": rules.get("bias", np.zeros((1, 1))) + more})
        for more in (0.0, far)
    )
    if "sinks" in rules:
        moved = replace(moved, rules=moved.rules | {"sinks": rules["sinks"] + far})
    results, truth = (run(Question.of(one)) for one in (moved, plain))
    for (name, axis), x in truth.items():
        if x.dtype == np.int64 or axis == "list":  # which of equal weights comes first is chance
            continue
        wide = x.astype(np.float64) + (far if name in ("largest", "max_logit") else 0.0)
        size = np.abs(np.where(np.isfinite(wide), wide, 0.0)).max(initial=1.0)
        allowed = 8 * float(ml_dtypes.finfo(case.q.dtype).eps) + 500 * float(np.finfo(usual).eps)
        np.testing.assert_allclose(results[name, axis].astype(np.float64), wide, 0, allowed * size, err_msg=name)


LAWS = (
    what_sees_nothing_is_zero,
    unseen_numbers_change_no_bit,
    a_nonfinite_number_reaches_only_what_sees_it,
    neither_strides_nor_threads_nor_a_second_run_change_a_bit,
    a_row_has_the_same_bits_whatever_the_others,
    a_batch_entry_alone_has_the_same_bits,
    what_is_added_to_all_logits_changes_nothing,
)


EACH = [  # what is recomputed is the same on every engine; Triton's interpreter takes long for what comes before
    each for each in product(LAWS, PASSES, engines.NAMES) if each[1] not in RECOMPUTED or each[2] != "triton"
]


def tier(law: Any, over: str, engine: str) -> Any:
    """Triton's interpreter is slow: one of its passes is tested in the gate, by half of the laws; the rest is long."""
    slow = pytest.mark.gate if over == "weights" and LAWS.index(law) % 2 == 0 else pytest.mark.long
    named = f"{law.__name__}-{over}-{engine}"
    return pytest.param(law, over, engine, id=named, marks=slow if engine == "triton" else ())


@pytest.mark.parametrize(("law", "over", "engine"), [tier(*each) for each in EACH])
def test_every_pass_on_every_engine_obeys_every_law(law: Any, over: str, engine: str):
    needs, _ = PASSES[over]
    if not hasattr(engines.get(engine), needs):
        pytest.skip(f"{engine} has no {needs}")
    limits: Any = INTERPRETED if engine == "triton" else {"most": MOST.get(over, 20_000)}

    @examples(0.05 if engine == "triton" else 0.3)
    @given(case=cases(**limits), data=st.data())
    def check(case: Case, data: st.DataObject) -> None:
        if not refused(engine, case):
            law(Run(over, engine), Question.of(case), data)

    check()


TIERS = {"weights": (), "cuts": pytest.mark.long}
LONG: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "window": (100, None), "softcap": 20.0},
    {"kv_lengths": [300, 2100], "sinks": [0.5, 1.0, -1.0, 0.0]},
    {"mask": np.random.default_rng(0).random((70, 2400)) < 0.01},
)


@pytest.mark.skipif(bool(native.missing()), reason="the compiled kernel is not here")
@pytest.mark.parametrize("over", [pytest.param(name, marks=TIERS.get(name, pytest.mark.gate)) for name in PASSES])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_rows_of_several_blocks_obey_the_laws(law: Any, over: str):
    """The native engine cuts long rows, and gives parts of few of them to several threads."""
    lengths = (2, 70) if over in RECOMPUTED else (70, 2)  # the first is in each run, and 70 rows are recomputed slowly

    @examples(0.1)
    @given(st.sampled_from(FLOATS), st.sampled_from(LONG), st.sampled_from(lengths), st.data())
    def check(dtype: Any, rules: dict[str, Any], queries: int, data: st.DataObject) -> None:
        rng = np.random.default_rng(0)
        sizes = (4, queries), (2, 2400), (2, 2400)
        q, k, v = (rng.standard_normal((2, heads, length, 24)).astype(dtype) for heads, length in sizes)
        rules = {**rules, "query_offset": 2400 - queries}
        if "mask" in rules:
            rules["mask"] = rules["mask"][:queries]
        law(Run(over, "native"), Question.of(Case(q, k, v, rules, 0)), data)

    check()


def test_top_lists_equal_weights_in_the_order_of_keys():
    q, k = np.zeros((1, 4)), np.zeros((2400, 4))
    np.testing.assert_array_equal(ch.AttentionMatrix(q, k).top(5).indices, [[0, 1, 2, 3, 4]])
    bias = np.zeros(2400)
    bias[[7, 600, 2100]] = 1.0
    np.testing.assert_array_equal(ch.AttentionMatrix(q, k, bias=bias).top(5).indices, [[7, 600, 2100, 0, 1]])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_logits_of_any_size_neither_overflow_nor_underflow(dtype: str):
    """The weights of each row, which are computed again from its state, sum to 1 all the same."""
    for size in (1e4, -1e4, 1e8, 1e12, -1e20, 1e30):
        q, k, v = (x.astype(dtype) for x in (size * normal(5, 8), normal(7, 8), normal(7, 3)))
        for engine in (*CPU, *(["triton"] if triton.reasons_not(describe(q, k, None, {}).problem) == [] else [])):
            A = ch.AttentionMatrix(q, k, engine=engine)
            assert np.isfinite(A @ v).all()
            if engine == "triton":  # its interpreter multiplies with NumPy, which may round a product by its shape
                continue
            assert_close(A[...].sum(axis=-1), np.ones(5), 1e-5)
            assert_close(A.top(7).weights.sum(axis=-1), np.ones(5), 1e-5)
            assert_close(A.received().sum(), 5, 1e-5)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "d_v"),
    [
        ((0, 4), (3, 4), 2),
        ((3, 4), (0, 4), 2),
        ((0, 4), (0, 4), 0),
        ((3, 0), (5, 0), 2),
        ((3, 4), (5, 4), 0),
        ((2, 4, 3, 5), (2, 2, 0, 5), 3),
        ((0, 4, 3, 5), (0, 2, 6, 5), 3),
        ((2, 0, 3, 5), (2, 0, 6, 5), 3),
        ((3, 0, 2, 4, 5), (3, 0, 1, 6, 5), 3),
    ],
)
def test_axes_of_length_zero(q_shape: tuple[int, ...], k_shape: tuple[int, ...], d_v: int):
    case = Case(normal(*q_shape), normal(*k_shape), normal(*k_shape[:-1], d_v), {}, 0)
    question, engine = Question.of(case), ch.plan(case.q, case.k).engine
    for over in PASSES:
        what_sees_nothing_is_zero(Run(over, engine), question, None)
    matrix = case.matrix()
    assert matrix[...].shape == matrix.shape == (*q_shape[:-1], k_shape[-2])
    assert matrix.T.shape == (*q_shape[:-2], k_shape[-2], q_shape[-2])
    assert (matrix.T @ np.ones(q_shape[-2])).shape == (*q_shape[:-2], k_shape[-2])
    np.testing.assert_array_equal(matrix.observe(case.v).output, case.attention())


@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"sinks": [0.3]}, {"alibi_slopes": [0.2], "window": (3, 1)}])
def test_one_head_has_the_bits_of_the_two_dimensional_call(rules: dict[str, Any]):
    q, k, v = normal(70, 8), normal(70, 8), normal(70, 5)
    flat = ch.attention(q, k, v, **rules)
    for lead in ((1,), (1, 1), (1, 1, 1)):
        heads = ch.attention(*(x.reshape(*lead, *x.shape) for x in (q, k, v)), **rules)
        np.testing.assert_array_equal(heads, flat.reshape(*lead, *flat.shape), strict=True)


def test_all_statistics_take_two_passes(monkeypatch: pytest.MonkeyPatch):
    passes = passes_of(engines.get(ch.plan(normal(2, 2), normal(2, 2)).engine), monkeypatch, "rows", "columns")
    matrix, v = ch.AttentionMatrix(normal(5, 4), normal(6, 4)), normal(6, 2)
    matrix.observe(v, logsumexp=True, entropy=True, top=2, received=True, peak=True, image=(2, 2))
    assert passes == ["rows", "columns"]
    matrix.observe(received=True, logsumexp=True)
    matrix.logsumexp()
    assert passes == ["rows", "columns", "columns"]


ROWS: dict[str, Any] = {"logsumexp": True, "max_logit": True, "entropy": True, "distance": True}
COLUMNS: dict[str, Any] = {"received": True, "peak": True, "image": (9, 70)}


def answers(case: Case, **wanted: Any) -> dict[str, Array]:
    """The requested statistics and the output, by name."""
    seen = case.matrix().observe(case.v, **wanted)
    return {name: getattr(seen, name) for name in (*wanted, "output")}


@given(case=cases(), data=st.data())
def test_requesting_other_statistics_changes_no_bit(case: Case, data: st.DataObject):
    together = answers(case, **ROWS, **COLUMNS)
    one = data.draw(st.sampled_from((*ROWS, *COLUMNS)))
    alone = answers(case, **{one: {**ROWS, **COLUMNS}[one]})
    if one == "received":  # beside an output alone, the native engine adds up the weights of the row pass
        np.testing.assert_allclose(together["received"], alone.pop("received"), rtol=1e-5, atol=1e-5)
    alone["output"], used = case.attention(), case.matrix()
    alone["logsumexp"] = used.logsumexp()  # which the matrix keeps from here on
    for name, array in {**alone, "output": used @ case.v, **({one: alone[one]} if one in alone else {})}.items():
        np.testing.assert_array_equal(together[name], array, err_msg=name, strict=True)
    np.testing.assert_array_equal(used.observe(peak=True).peak, together["peak"], strict=True)


def test_inputs_are_not_modified():
    rng = np.random.default_rng(0)
    q, k, v, bias = (rng.standard_normal(shape) for shape in ((5, 4), (7, 4), (7, 3), (5, 7)))
    before = [x.copy() for x in (q, k, v, bias)]
    ch.AttentionMatrix(q, k, bias=bias, softcap=2.0).observe(v, **ROWS, **COLUMNS)
    for x, y in zip((q, k, v, bias), before, strict=True):
        np.testing.assert_array_equal(x, y)
