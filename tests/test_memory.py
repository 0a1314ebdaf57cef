"""Promise 3: memory O(queries + keys) beyond inputs and outputs, whatever is observed; measured in a fresh process."""

import numpy as np
import pytest

from clearhead import engines
from clearhead.core.problem import describe
from problems import in_the_gate
from programs import python

MEASURE = """
import sys, tracemalloc
import numpy as np, clearhead as ch
import clearhead.engines.portable

n, width, form = int(sys.argv[1]), 64 if int(sys.argv[1]) > 20_000 else 16, sys.argv[2]
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((n, width), dtype=np.float32) for _ in range(3))
g = np.ones(n, np.float32)
labels = np.arange(n) * 10 // n
warm = ch.AttentionMatrix(q[:9], k[:9]).observe(v[:9], top=2, received=True)
tracemalloc.start()
before = tracemalloc.get_traced_memory()[0]
answer = eval(form, {"ch": ch, "q": q, "k": k, "v": v, "g": g, "np": np, "labels": labels, "n": n,
                     "A": lambda **rules: ch.AttentionMatrix(q, k, **rules)})
print(tracemalloc.get_traced_memory()[1] - before)
"""
HIGH_WATER = """
import resource, sys
import numpy as np, clearhead as ch

n, rng = int(sys.argv[1]), np.random.default_rng(0)
q, k, v = (rng.standard_normal((n, 64), dtype=np.float32) for _ in range(3))
asked = dict(logsumexp=True, entropy=True, received=True, top=8, image=(256, 256))
ch.AttentionMatrix(q[:9], k[:9]).observe(v[:9], **asked)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seen = ch.AttentionMatrix(q, k).observe(v, **asked)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
ALONG = """
import resource, sys
import torch, clearhead as ch

heads, n = int(sys.argv[1]), int(sys.argv[2])

def attend(*given):
    return ch.attention(*given, causal=True)

def peaks(n):
    q, k, v, weights, *along = (torch.randn(1, heads, n, 64) for _ in range(7))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for call in (
        lambda: torch.func.jvp(attend, (q, k, v), tuple(along)),
        lambda: torch.autograd.functional.vhp(lambda *x: (attend(*x) * weights).sum(), (q, k, v), tuple(along)),
    ):
        call()
        yield (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

list(peaks(64))
print(*peaks(n))
"""
FORMS = [
    "ch.attention(q, k, v)",
    "ch.attention(q, k, v, causal=True)",
    "A() @ v",
    "A().T @ g",
    "A().logsumexp()",
    "A().max_logit()",
    "A().entropy()",
    "A().distance()",
    "A().received()",
    "A().peak()",
    "A().top(8)",
    "A().image(64, 64)",
    "A().groups(labels, labels)",
    "A(window=(100, 100), sinks=[0.5]).observe(v, entropy=True)",
    "A(bias=np.zeros(n, np.float32)).received()",
    "A(mask=np.ones((n, 1), bool)).received()",
    "A(bias=np.zeros((1, n), np.float32))[n // 2]",
    "A()[:, 5]",
    "A().T[7]",
]


def peak_of(form: str, n: int) -> int:
    """Bytes at the highest point, beyond the inputs."""
    return int(python(MEASURE, n, form))


@pytest.mark.parametrize("form", in_the_gate(FORMS, *FORMS[:1], *FORMS[2:8], *FORMS[9:13], *FORMS[14:]))
def test_twice_the_length_takes_at_most_twice_the_memory(form: str):
    short, long = peak_of(form, 2048), peak_of(form, 4096)
    assert long <= 2 * short, f"{short} bytes, then {long}"


@pytest.mark.parametrize(
    ("engine", "n"),
    [pytest.param("native", 65_536, marks=pytest.mark.long), pytest.param("portable", 8192, marks=pytest.mark.gate)],
)
def test_sixty_five_thousand_tokens_fit_in_300_megabytes(engine: str, n: int):
    """Measured by the process's peak memory, which includes memory allocated in C++; fewer tokens in less of it."""
    if engines.get(engine).reasons_not(describe(*np.zeros((3, 2, 2)), {}).problem):
        pytest.skip(f"the {engine} engine is not here")
    assert int(python(HIGH_WATER, n, CLEARHEAD_ENGINE=engine)) < 300e6 * n / 65_536


def peaks_along(heads: int, n: int) -> list[int]:
    """Bytes at the highest point beyond the inputs: of forward mode; of that and a Hessian times a vector."""
    return [int(peak) for peak in python(ALONG, heads, n).split()]


@pytest.mark.gate
def test_derivatives_along_a_direction_store_no_weights():
    """In arrays as large as q: there are two results of the first call, and of the second, with the gradients, eight.

    One matrix of weights is as large as 64 of them.
    """
    one = 2 * 4096 * 64 * 4
    forward, second = peaks_along(2, 4096)
    assert forward < 7 * one, forward / one
    assert second < 15 * one, second / one


@pytest.mark.long
def test_a_hessian_times_a_vector_of_sixteen_thousand_tokens_fits_in_400_megabytes():
    """8 heads, d 64, every derivative by q, k and v. One matrix of weights has 8.6 GB."""
    assert max(peaks_along(8, 16_384)) < 400e6


@pytest.mark.gate
@pytest.mark.parametrize("tile", ["[1, ::2, 0, 3]", "[1, ::2, 0, :, 3]"])
def test_a_broadcast_bias_is_never_expanded_in_memory(tile: str):
    """Nine batches share one bias of 17 MB, and so do a row and a column of three of them."""
    inputs = "(np.zeros((3, 3, 1, 2048, 4), np.float32), np.zeros((2048, 2048), np.float32))"
    row = f"(lambda q, bias: ch.AttentionMatrix(q, q, bias=bias){tile})(*{inputs})"
    assert peak_of(row, 9) < peak_of(inputs, 9) + 5e6
