"""Products by weights as files pack them: those of the unpacked numbers, with the same bits in any company."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.core.arrays import bfloat16
from clearhead.engines import native
from clearhead.models.weights import Stored

NUMBERS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": bfloat16}
HALVES = {  # where a block has a float16, which random bits may make infinite
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


@st.composite
def tensors(draw) -> tuple[Stored, np.ndarray, np.random.Generator]:
    """A matrix of random bits in any packing, and its numbers as NumPy or gguf unpack them, (d_out, d_in)."""
    rng, kind = np.random.default_rng(draw(st.integers(0))), draw(st.sampled_from(sorted(native.PACKINGS)))
    rows = draw(st.integers(1, 70))
    if kind in NUMBERS:
        data = rng.standard_normal((rows, draw(st.integers(1, 1100)))).astype(NUMBERS[kind])
        numbers = data.astype(np.float32)
    else:
        size, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        data = rng.integers(0, 256, (rows, draw(st.integers(1, 1300 // size)), width), np.uint8)
        for place in HALVES.get(kind, (0,)):
            data[..., place + 1] &= 0xBF if kind != "MXFP4" else 0xFF
        if kind == "MXFP4":
            data[..., 0] = rng.choice([0, 1, 2, 3, 100, 127, 140], data.shape[:2])
        data = data.reshape(rows, -1)
        numbers = quants.dequantize(data, GGMLQuantizationType[kind])
    transposed = kind in NUMBERS and draw(st.booleans())
    data, numbers = (data.T, numbers.T) if transposed else (data, numbers)
    tensor = Stored(kind, numbers.shape, data)
    if draw(st.booleans()):
        start, stop = sorted(rng.choice(len(numbers) + 1, 2, replace=False).tolist())
        tensor, numbers = tensor.part(start, stop), numbers[start:stop]
    if draw(st.booleans()) and not transposed:
        order = rng.permutation(len(numbers))
        tensor = Stored(kind, numbers.shape, tensor.data, order=order)
        numbers = numbers[order]
    return tensor, numbers.astype(np.float64), rng


def close(made: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    """A sum's error is a few roundings of the sum of magnitudes, for each of which float32 has 2⁻²⁴."""
    allowed = 2.0**-24 * (4 + len(w)) * (np.abs(x) @ np.abs(w)) + 1e-37
    assert made.shape == allowed.shape
    assert (np.abs(made - x @ w) <= allowed).all()


@pytest.mark.skipif(bool(native.missing()), reason="no kernel: NumPy promises no bits")
@given(tensors(), st.integers(1, 40), st.sampled_from([(), (1,), (2,)]))
def test_products_are_those_of_the_unpacked_numbers(drawn, tokens, lead):
    tensor, w, rng = drawn
    x, g = (rng.standard_normal((*lead, tokens, size)).astype(np.float32) for size in tensor.shape[::-1])
    made, back = tensor.product(x), tensor.product(g, back=True)
    close(made, x.astype(np.float64), w.T)
    close(back, g.astype(np.float64), w)
    np.testing.assert_allclose(tensor.product(x.astype(np.float64)), x @ w.T, 1e-9, 1e-9)
    np.testing.assert_allclose(tensor.product(g.astype(np.float64), back=True), g @ w, 1e-9, 1e-9)
    before, start = ch.get_num_threads(), rng.integers(0, tokens)
    some = slice(start, start + int(rng.integers(1, 6)))
    ch.set_num_threads(1 + before % 3)
    try:
        np.testing.assert_array_equal(tensor.product(x[..., some, :]), made[..., some, :])
        np.testing.assert_array_equal(tensor.product(g[..., some, :], back=True), back[..., some, :])
    finally:
        ch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["IQ2_XS", "TQ1_0"])
def test_other_packings_are_unpacked_by_gguf_for_a_product(kind, monkeypatch):
    monkeypatch.setattr("clearhead.models.weights._ROWS", 1024)
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 60, (7, 2 * width), np.uint8)
    w = quants.dequantize(data, GGMLQuantizationType[kind]).astype(np.float64)
    x, tensor = rng.standard_normal((3, 2 * size)).astype(np.float32), Stored(kind, w.shape, data)
    close(tensor.product(x), x.astype(np.float64), w.T)
    close(tensor.product(x[:, :7], back=True), x[:, :7].astype(np.float64), w)


@pytest.mark.parametrize("kind", sorted(set(native.PACKINGS) - set(NUMBERS)))
def test_damaged_blocks_give_what_their_numbers_do(kind):
    """Random bytes as blocks, infinite scales among them: a row with such a number has no finite product."""
    rng = np.random.default_rng(0)
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (45, 3 * width), np.uint8)
    with np.errstate(all="ignore"):
        w = quants.dequantize(data, GGMLQuantizationType[kind]).astype(np.float64)
        w[np.abs(w).max(axis=1) > 1e30] = np.nan  # MXFP4's scales reach 2¹²⁷
    finite = np.isfinite(w).all(axis=1)
    x = rng.standard_normal((7, 3 * size)).astype(np.float32)
    with np.errstate(all="ignore"):
        made = Stored(kind, w.shape, data).product(x)
    close(made[:, finite], x.astype(np.float64), w[finite].T)
    assert kind == "MXFP4" or not np.isfinite(made[:, ~finite]).any()
