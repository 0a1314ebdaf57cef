"""Long inputs are converted head by head: every mistake's numbers are those of the short way, and memory stays low."""

import subprocess
import sys

import numpy as np
import pytest

from clearhead.diagnosing import operands
from clearhead.diagnosing.inputs import plain_inputs
from clearhead.diagnosing.mistakes import mistakes
from clearhead.diagnosing.recipe import RIGHT, Selection, changed
from clearhead.diagnosing.workings import Workings
from seeds import fresh

_SELECTIONS = [((0, 1, 2, 3), (0, 3, 5)), ((2,), (1, 2)), ((0, 1), tuple(range(12)))]


@pytest.mark.parametrize("precision", [None, np.dtype(np.float32)])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 4), (2, 4), (2, 2)])
@np.errstate(all="ignore")
def test_head_by_head_gives_the_same(monkeypatch, batch, kv_heads, precision):
    q = fresh().standard_normal((batch, 4, 12, 8)).astype(np.float32)
    k, v = fresh().standard_normal((2, batch, kv_heads, 12, 8)).astype(np.float32)
    inputs = plain_inputs(q, k, v, np.zeros_like(q), "output", None, {"causal": True})
    changes = [change for mistake in mistakes() for change in mistake.variants(inputs)]
    recipes = [recipe for change in changes if not (recipe := changed(RIGHT, change)).unknown]
    assert len(recipes) > 50
    wholes, singles = Workings(inputs, precision), Workings(inputs, precision)
    for recipe in recipes:
        for heads, rows in _SELECTIONS:
            answers = []
            for workings, most in ((wholes, 10**9), (singles, 0)):
                monkeypatch.setattr(operands, "_LONG", most)
                answers.append(workings.answer(recipe, Selection(heads, rows)))
            whole, single = answers
            assert whole.dtype == single.dtype
            tolerance = 1e-4 if precision else 1e-11
            np.testing.assert_allclose(single, whole, rtol=tolerance, atol=tolerance * (1 + _largest(whole)))


def _largest(x):
    return float(np.abs(x[np.isfinite(x)]).max(initial=0))


LONG = """
import resource, sys
import numpy as np, clearhead as ch

q, k, v = np.random.default_rng(int(sys.argv[1])).standard_normal((3, 8, 4096, 64), dtype=np.float32)
theirs = ch.attention(q, k, v, causal=True)
theirs = (theirs + 0.05 * np.sin(7 * theirs)[:, ::-1]).astype(np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = ch.diagnose(q, k, v, theirs, causal=True)
print(found.verdict, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.gate
def test_memory_of_a_long_unexplained_case():
    """The process's peak memory, which includes what is allocated in C++."""
    seed = str(fresh().integers(2**31))
    done = subprocess.run([sys.executable, "-c", LONG, seed], capture_output=True, text=True, check=True)
    verdict, peak = done.stdout.split()
    assert verdict == "unexplained"
    assert int(peak) < 500e6
