"""What the page computes under each rule, against the reference, and how it prints shares: its modules run in node."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from clearhead.core.arrays import bfloat16
from clearhead.digits import percent
from seeds import fresh

SCRIPT = Path(__file__).parents[1] / "page/check/weights.js"
PRINTS = SCRIPT.with_name("numbers.js")
B, H, KV, N, M, D, DV = 2, 4, 2, 5, 7, 3, 6
RNG = np.random.default_rng(11)
ALLOWED = RNG.random((B, 1, N, M)) < 0.6
ALLOWED[0, 0, 2] = False  # a query that sees nothing
LABELS = RNG.integers(-1, 3, (B, N)), RNG.integers(-1, 4, (B, M))
RULES = {
    "none": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "causal": {"causal": True, "query_offset": 0},
    "offsets": {"causal": True, "query_offset": np.array([2, -3])},
    "window": {"window": (2, 1), "query_offset": 1},
    "bias": {"bias": RNG.standard_normal((H, 1, M))},
    "forbidding bias": {"bias": np.where(ALLOWED, 0.5, -np.inf)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0])},
    "mask": {"mask": ALLOWED},
    "lengths": {"kv_lengths": np.array([4, 7]), "query_lengths": np.array([5, 0])},
    "segments": {"query_segments": RNG.integers(0, 2, (B, N)), "kv_segments": RNG.integers(0, 2, (B, M))},
    "a scale for each head": {"scale": np.array([0.3, -0.5, 0.0, 2.0])},
    "spans": {"spans": (*LABELS, np.where(RNG.random((3, 4)) < 0.2, -np.inf, RNG.standard_normal((B, H, 3, 4))))},
    "spans and a bias": {"spans": (LABELS[0][0], LABELS[1], RNG.standard_normal((3, 4))), "bias": RNG.random((N, M))},
    "sinks": {"sinks": np.array([0.5, -np.inf, 2.0, 0.0])},
    "all": {"scale": 0.7, "softcap": 3.0, "bias": RNG.standard_normal((N, M)), "window": (3, None), "causal": True}
    | {"query_offset": 2, "mask": ALLOWED, "alibi_slopes": np.ones(H) * 0.1, "kv_lengths": np.array([6, 5])},
}


def in_node(script, *arguments):
    """What one of the page's programs prints."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    done = subprocess.run(["node", script, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def in_the_page(trace, tmp_path):
    trace.save(tmp_path / "page.html")
    heads = in_node(SCRIPT, tmp_path / "page.html")
    return {name: np.array([[[float(x) for x in row] for row in head[name]] for head in heads]) for name in heads[0]}


def flat(array):
    return np.asarray(array, dtype=np.float64).reshape(-1, *np.shape(array)[-2:])


CASES = [(rule, np.float32) for rule in RULES]
CASES += [(rule, dtype) for rule in ("none", "all") for dtype in (np.float64, np.float16, bfloat16)]


@pytest.mark.parametrize(("rule", "dtype"), CASES, ids=str)
def test_the_page_computes_what_the_reference_computes(rule, dtype, tmp_path):
    rng = np.random.default_rng(5)
    shapes = (B, H, N, D), (B, KV, M, D), (B, KV, M, DV)
    trace = ch.trace(*(rng.standard_normal(shape).astype(dtype) for shape in shapes), **RULES[rule])
    page = in_the_page(trace, tmp_path)
    for name in ("scores", "masked", "weights", "output"):
        np.testing.assert_allclose(page[name], flat(getattr(trace, name)), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(page["tile"], flat(trace.weights), rtol=1e-6, atol=1e-30)  # float32, rounded once


def test_a_tile_of_the_page_equals_the_matrix(tmp_path):
    q, k, v = np.random.default_rng(6).standard_normal((3, 2, 33, 64)).astype(np.float32)
    page = in_the_page(ch.trace(q, k, v, causal=True), tmp_path)
    np.testing.assert_allclose(page["tile"], np.asarray(ch.AttentionMatrix(q, k, causal=True)[:]), rtol=2e-5, atol=1e-9)


def test_the_page_prints_shares_as_the_terminal_does():
    shares = [0.0, 1.0, 0.1, 0.001, 0.00001, *(10.0 ** -(14 * fresh().random(2000))).tolist()]
    assert in_node(PRINTS, json.dumps({"percent": shares}))["percent"] == [percent(share) for share in shares]
