"""Wrong arguments to every public callable, and random calls, give a right result or one of the library's own errors.

Python's TypeError is right only where a call does not fit the signature; every call here fits. A failure prints the
line @reproduce_failure(…), which draws the same again; `calls.WRONG[name]()` is the value of that name.
"""

import inspect
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import calls
import clearhead as ch
import public
from calls import WRONG
from clearhead.core import definition
from clearhead.core.call import describe
from clearhead.core.rules import RULES
from clearhead.engines import native
from clearhead.errors import ClearheadError
from problems import Case, cases, examples
from seeds import fresh

CALLS = {**calls.public(), **calls.in_frameworks()}

NOT_DRAWN = {
    ("explain", "model"): "names are looked for in a hub, which takes two seconds each; test_hub.py has them",
    ("Learning.words", "key"): "a key of words/, which the report asks for",
    ("Learning.words", "language"): "likewise",
    ("testing.assert_attention", "examples"): "2**70 examples take their time",
    ("Trace.document", "scene"): "made by the program itself, as are its fields",
}
NOT_CALLED = {
    "torch.dropped KVCache.step": "asked by clearhead's own hooks and layers, with what PyTorch has checked",
    "with_call effect_engine": "asked by other modules, with what they were given by the same matrix",
    "acts_in may_act heads_in": "asked by the engine of edits, of layers that it names itself",
    "torch.activate torch.active torch.deactivate torch.explain get_num_threads vllm.register": "take no arguments",
    "explaining.learning.learning": "takes no argument",
    "EffectMatrix Answers Observation Seen Explanation HeadSteps explaining.learning.Learning textbook.sparse.Pattern "
    "textbook.why_scale.WhyScale": "made by calls",
}
CALLABLE = ("a type", "a function")
CALLERS = {(name, value) for name in ("each", *RULES) for value in CALLABLE}  # a caller's function may raise anything


@pytest.fixture(autouse=True, scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where a value happens to be a valid path, the file is written into an empty folder."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("written"))
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("MPLBACKEND", "Agg")  # plots must not open a window
        yield
    os.chdir(before)


def answers(name: str, wrong: dict[str, str]) -> None:
    """Fail where a call raises an error that is not one of the library's own."""
    if CALLERS & set(wrong.items()):
        return
    given = {parameter: calls.WRONG[value]() for parameter, value in wrong.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad")
            CALLS[name](given)
    except ClearheadError as error:
        assert len(str(error)) < 2000, f"{name} says {len(str(error))} characters"  # noqa: PT017
    except BaseException as error:
        error.add_note(f"raised by {name}({', '.join(f'{k}={v}' for k, v in wrong.items())})")
        raise
    finally:
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")


def public_names() -> Iterator[str]:
    """Every public function and class, and each method that takes an argument."""
    known = public.names()
    yield from (name.removeprefix("clearhead.") for name, x in known.items() if inspect.isclass(x) or callable(x))
    for kind in (*filter(inspect.isclass, known.values()), *public.returned()):
        for local, value in public.members(kind).items():
            method = None if isinstance(value, property) else public.function(value)
            if method and len(inspect.signature(method).parameters) > 1:
                yield f"{kind.__name__}.{local}"


def test_every_public_callable_is_called_here():
    left_out = {name for names in NOT_CALLED for name in names.split()}
    missing = [n for n in public_names() if n not in CALLS and not {n, n.split(".")[-1]} & left_out]
    assert not missing, f"not in calls.py: {missing}"


def names(name: str) -> list[str]:
    return [parameter for parameter in CALLS[name].names if (name, parameter) not in NOT_DRAWN]


DRAWN = [name for name in CALLS if names(name)]


@pytest.mark.parametrize("name", DRAWN)
@examples(0.5)
@given(data=st.data())
def test_random_wrong_arguments_give_an_answer_or_an_error(name: str, data: st.DataObject):
    chosen = data.draw(st.lists(st.sampled_from(names(name)), min_size=1, max_size=2, unique=True))
    answers(name, {parameter: data.draw(st.sampled_from(sorted(calls.WRONG)), parameter) for parameter in chosen})


@pytest.mark.gate
@pytest.mark.parametrize("name", DRAWN)
def test_each_wrong_argument_gives_an_answer_or_an_error(name: str):
    """A twelfth of the values for each parameter, others in each run."""
    for parameter in names(name):
        for value in fresh().choice(sorted(calls.WRONG), len(calls.WRONG) // 12, replace=False):
            answers(name, {parameter: value})


@pytest.mark.parametrize(("name", "call"), [(n, c) for n, c in calls.public().items() if not n[0].isupper()])
def test_unknown_names_are_refused(name: str, call: calls.Call):
    def ask(**extra: Any) -> Any:
        return call.call(**call.right, **extra)

    with pytest.raises(TypeError, match="atention"):
        ask(atention=True)


NAMES = (*"qkv", *RULES, "engine", "causl")


@examples(4)
@given(case=cases(most=5_000), data=st.data())
def test_a_call_is_right_or_raises_a_library_error(case: Case, data: st.DataObject):
    """A call under any rules, of which up to two arguments are wrong ones."""
    inputs: dict[str, Any] = {"q": case.q, "k": case.k, "v": case.v, **case.rules}
    for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=2, unique=True)):
        inputs[name] = WRONG[data.draw(st.sampled_from(sorted(WRONG)), name)]()
    try:
        output = np.asarray(ch.attention(**inputs))
    except ClearheadError:
        return
    inputs.pop("engine", None)
    read = describe(*(inputs.pop(name) for name in "qkv"), inputs)
    book = definition.attend(read.problem, read.q, read.k, read.v)
    assert book.output is not None
    loose = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 1e-3}.get(output.dtype, 0.1)
    truth = read.problem.restore(book.output)
    fine = np.isfinite(truth) & (np.abs(truth) < 1e4)
    assert output.shape == truth.shape
    np.testing.assert_allclose(output.astype(np.float64)[fine], truth[fine], rtol=loose, atol=loose)


@given(
    st.lists(st.tuples(st.sampled_from((0, 1, 2, 3, 6, 7, 2**40)), st.integers(1, 5)), min_size=5, max_size=5),
    st.data(),
)
@pytest.mark.skipif(bool(native.missing()), reason="the compiled kernel is not here")
def test_the_native_binding_refuses_mismatched_shapes(sizes: list[tuple[int, int]], data: st.DataObject):
    problem = describe(np.ones((2, 3, 4), np.float32), np.ones((2, 5, 4), np.float32), None, {}).problem
    rules = native.described(problem)
    right = [(1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6), (1, 2, 3, 6), (1, 2, 3)]
    shapes = [
        tuple(min(s, 9) for s, _ in sizes[: len(shape)]) if data.draw(st.booleans()) else shape for shape in right
    ]
    dtype = data.draw(st.sampled_from((np.float32, np.float64, np.uint8, ml_dtypes.bfloat16)))
    q, k, v, output, rows = (np.ones(shape, dtype if i == 2 else np.float32) for i, shape in enumerate(shapes))
    try:
        native.kernel.rows(1, rules, q, k, v, {"output": output, "largest": rows, "log_sum": rows})
    except (ValueError, TypeError):
        return
    assert shapes[:2] == right[:2]
    assert v.dtype == np.float32
    assert v.shape[:3] == (1, 2, 5) or v.shape[1] in (1, 2)
    assert output.size == 6 * v.shape[-1]
    assert rows.size == 6
