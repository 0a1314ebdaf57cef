"""Wrong arguments to every public callable give a result or one of the library's own errors.

Python's TypeError is right only where a call does not fit the signature; every call here fits. A failure prints the
line @reproduce_failure(…), which draws the same again; `calls.WRONG[name]()` is the value of that name.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import calls
from clearhead.errors import ClearheadError
from seeds import fresh

CALLS = {**calls.public(), **calls.in_frameworks()}

NOT_DRAWN = {
    ("explain", "model"): "names are looked for in a hub, which takes two seconds each; test_hub.py has them",
    ("why", "model"): "likewise",
    ("Trace.document", "scene"): "made by the program itself, as are its fields",
    ("WeightsTrace.document", "scene"): "likewise",
}
OWN = {("each", "a type"), ("each", "a function")}  # a function given by the caller may raise anything


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
    if OWN & set(wrong.items()):
        return
    given = {parameter: calls.WRONG[value]() for parameter, value in wrong.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad")
            warnings.filterwarnings("ignore", message="Observation.among goes")
            CALLS[name](given)
    except ClearheadError:
        return
    except BaseException as error:
        error.add_note(f"raised by {name}({', '.join(f'{k}={v}' for k, v in wrong.items())})")
        raise
    finally:
        if "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close("all")


def names(name: str) -> list[str]:
    return [parameter for parameter in CALLS[name].names if (name, parameter) not in NOT_DRAWN]


DRAWN = [name for name in CALLS if names(name)]


@pytest.mark.parametrize("name", DRAWN)
@settings(print_blob=True, max_examples=40)
@given(data=st.data())
def test_random_wrong_arguments_give_an_answer_or_a_library_error(name: str, data: st.DataObject):
    chosen = data.draw(st.lists(st.sampled_from(names(name)), min_size=1, max_size=2, unique=True))
    answers(name, {parameter: data.draw(st.sampled_from(sorted(calls.WRONG)), parameter) for parameter in chosen})


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_each_wrong_argument_alone_gives_an_answer_or_a_library_error(name: str):
    """A sixth of the values for each parameter, others in each run."""
    for parameter in names(name):
        for value in fresh().choice(sorted(calls.WRONG), len(calls.WRONG) // 6, replace=False):
            answers(name, {parameter: value})


@pytest.mark.parametrize(("name", "call"), [(n, c) for n, c in calls.public().items() if not n[0].isupper()])
def test_unknown_names_are_refused(name: str, call: calls.Call):
    def ask(**extra: Any) -> Any:
        return call.call(**call.right, **extra)

    with pytest.raises(TypeError, match="atention"):
        ask(atention=True)
