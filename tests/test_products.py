"""Products with a model's weights: NumPy's numbers from threads of ours, with BLAS's own threads as they were."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.models import weights


@pytest.fixture(autouse=True)
def two_threads():
    before = ch.get_num_threads()
    ch.set_num_threads(2)
    yield
    ch.set_num_threads(before)


@given(rows=st.integers(1, 70), lead=st.sampled_from([(), (1,), (3,)]), wide=st.integers(1, 70), seed=st.integers(0))
def test_products_are_numpys(rows, lead, wide, seed):
    rng = np.random.default_rng(seed)
    kind = rng.choice([np.float32, np.float64])
    x, w = rng.standard_normal((*lead, rows, 33)).astype(kind), rng.standard_normal((wide, 33)).astype(kind).T
    before, weights._SHARED = weights._SHARED, 0  # every product is shared
    try:
        made = weights.product(x, w)
    finally:
        weights._SHARED = before
    assert (made.shape, made.dtype) == ((*lead, rows, wide), kind)
    np.testing.assert_allclose(made, x @ w, rtol=1e-5 if kind == np.float32 else 1e-12, atol=1e-5)


def test_blas_has_its_threads_again_after_products_at_once():
    blas = weights._blas()
    before = [each.num_threads for each in blas]
    counts = [2 - place % 2 for place in range(len(blas))]  # where there is more than one BLAS, not the same
    for each, count in zip(blas, counts, strict=True):
        each.set_num_threads(count)
    x, w = np.ones((400, 200), np.float32), np.ones((200, 300), np.float32)
    with ThreadPoolExecutor(6) as pool:
        assert all((made == 200).all() for made in pool.map(lambda _: weights.product(x, w), range(60)))
    assert [each.num_threads for each in blas] == counts
    with pytest.raises(ValueError, match="mismatch"):
        weights.product(x, w.T)
    assert [each.num_threads for each in blas] == counts
    for each, count in zip(blas, before, strict=True):
        each.set_num_threads(count)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads, which is what is tested
def test_a_forked_process_makes_threads_of_its_own():
    x, w = np.ones((400, 200), np.float32), np.ones((200, 300), np.float32)
    weights.product(x, w)
    child = os.fork()
    if not child:
        signal.alarm(30)  # rather than wait for threads that the fork left behind
        os._exit(0 if (weights.product(x, w) == 200).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
