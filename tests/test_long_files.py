"""Long texts: what the files of their pages hold, what these compute in Node; notebooks, pictures, the command."""

import html
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.core.arrays import bfloat16
from clearhead.errors import SelectionError
from clearhead.view import images, long, page
from clearhead.view.answers import tile
from long_pages import TOKENS, H, document_of, end_of, long_page, matrix, two_layers
from page_files import HOSTILE, header_of
from problems import in_the_gate
from seeds import fresh
from test_page_values import CHECK, in_node

RNG = np.random.default_rng(8)


small = pytest.fixture(two_layers, scope="module")


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 9))
def test_a_picture_holds_each_pixels_largest_weight(n, m, side, causal, seed):
    rules = {"causal": True, "query_offset": m - n} if causal else {}
    part = matrix(n, m, seed=seed, **rules)
    weights = part[0].astype(np.float64)
    result = images.pictures(part.part(0), side)
    rows, cols = (np.arange(min(side, size) + 1) * size // min(side, size) for size in (n, m))
    alone = weights.copy()
    alone[:, :, 0] = 0
    for r in range(len(rows) - 1):
        for c in range(len(cols) - 1):
            block = alone[:, rows[r] : rows[r + 1], cols[c] : cols[c + 1]]
            assert np.allclose(result["most"][:, r, c], block.max((1, 2)), atol=1e-6)
        first = weights[:, rows[r] : rows[r + 1], 0]
        assert np.allclose(result["first_most"][:, r], first.max(1), atol=1e-6)


# what the page computes

N, M = 37, 45
SPAN_TABLE = np.where(RNG.random((H, 3, 2)) < 0.2, -np.inf, RNG.standard_normal((H, 3, 2)))
RULES = {
    "none": {},
    "causal": {"causal": True, "query_offset": 8},
    "window": {"window": (9, 3), "query_offset": 4},
    "softcap and alibi": {"softcap": 1.5, "alibi_slopes": np.array([0.5, 0.25, 0.0, 0.1]), "query_offset": 0},
    "mask": {"mask": RNG.random((1, 1, N, M)) < 0.6},
    "mask for each head": {"mask": RNG.random((1, H, N, M)) < 0.6, "bias": RNG.standard_normal((1, H, N, M))},
    "spans": {"spans": (RNG.integers(-1, 3, N), RNG.integers(-1, 2, M), SPAN_TABLE), "scale": [0.3, 0.1, -0.2, 0.5]},
    "sinks and lengths": {"sinks": np.array([0.5, -np.inf, 2.0, 0.0]), "kv_lengths": np.array([33])},
}


def ask(head=0, level=0):
    """The first tile of a head."""
    return {"layer": 0, "head": head, "level": level, "row": 0, "col": 0}


def computed(document, tmp_path, *wanted):
    """What the page computes: the tiles, the bounds of their rows, and the rest of each answer."""
    (tmp_path / "page.html").write_bytes(long_page(document))
    results = in_node(CHECK / "head.js", tmp_path / "page.html", "tiles", json.dumps(wanted))
    return [
        (np.array(result["tile"]).reshape(256, 256), np.array(result["bounds"])[:, None], result) for result in results
    ]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", in_the_gate([np.float32, bfloat16], np.float32), ids=str)
def test_a_tile_of_the_page_is_the_matrix_within_its_bound(rule, dtype, tmp_path):
    part = matrix(N, M, dtype=dtype, **RULES[rule])
    document = document_of(part)
    for head, (tiles, bounds, _) in zip((1, 3), computed(document, tmp_path, ask(1), ask(3)), strict=True):
        page, weights = tiles[:N, :M], np.asarray(part[0, head], np.float64)
        assert np.array_equal(page == -1, tile(part.part(0), head, slice(N), slice(M), 1) == -1)
        seen = page != -1
        assert (bounds < 1e-3).all()
        assert (abs(page - weights) <= bounds * weights + 1e-9)[seen].all()


def test_the_page_and_the_server_compute_the_same_pixels(tmp_path):
    part = matrix(len(TOKENS), causal=True)
    levels = (0, 1, 2)
    for level, (tiles, _, _) in zip(
        levels, computed(document_of(part), tmp_path, *(ask(2, x) for x in levels)), strict=True
    ):
        expected = tile(part.part(0), 2, slice(None), slice(None), 2**level)
        assert np.allclose(tiles[: expected.shape[0], : expected.shape[1]], expected, atol=1e-6)


def test_rounded_queries_and_keys_state_a_wider_bound_that_holds(tmp_path):
    part = matrix(N, M)
    ((tiles, bounds, _),) = computed(document_of(part, room=1), tmp_path, ask())
    page = tiles[:N, :M]
    off = abs(page - part[0, 0]) / part[0, 0]
    assert off.max() > 1e-4
    assert (off <= bounds).all()
    assert np.allclose(page.sum(1), 1, atol=1e-5)  # the log-sum-exp is that of the rounded queries and keys


def test_page_and_pictures_end_their_scale_at_one_weight(small):
    rng = np.random.default_rng(4)
    peaks = [rng.random(size).astype(np.float32) for size in (0, 1, 2, 9, 10, 11, 20, 21, 99, 500) for _ in range(9)]
    for row in peaks:
        row[rng.random(len(row)) < 0.1] = 0
        row[rng.random(len(row)) < 0.1] = np.nan
    asked = [[str(x) for x in row.astype(np.float64)] for row in peaks]
    assert in_node(CHECK / "numbers.js", json.dumps({"reach": asked}))["reach"] == [images.reach(row) for row in peaks]
    weights = np.asarray(small[0][0], np.float64)
    assert images.reach(weights[1].max(1)) == pytest.approx(end_of(weights[1]))
    assert images.reach(np.array([1.0, 0.2])) == 0.2
    assert images.reach(np.array([0.7])) == 0.7
    assert images.reach(np.array([np.nan])) == 1.0
    layer = document_of(small[0], TOKENS).header["runs"][0]["layers"][0]
    assert layer["reach"] == pytest.approx([end_of(head) for head in weights], rel=1e-5)


@pytest.mark.gate
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("room", [1e6, 1], ids=["as it is", "rounded"])
def test_the_true_weight_lies_within_the_printed_interval(seed, room, tmp_path):
    """Compared with float64 weights of the unrounded inputs."""
    part = matrix(N, M, seed=seed, d=16)
    q, k = np.asarray(part.call.q[0, 0], np.float64), np.asarray(part.call.k[0, 0], np.float64)
    logits = q @ k.T / 4
    true = np.exp(logits - logits.max(1, keepdims=True))
    true /= true.sum(1, keepdims=True)
    ((tiles, bounds, _),) = computed(document_of(part, room=room), tmp_path, ask())
    pairs = np.stack([tiles[:N, :M], tiles[:N, :M] * bounds], -1).reshape(-1, 2).tolist()
    said = in_node(CHECK / "numbers.js", json.dumps({"within": pairs}))["within"]
    value, bound = np.array([[float(x) for x in each.split(" ± ")] for each in said]).T
    assert (abs(true.ravel() - value) <= bound * (1 + 1e-9)).all()


def test_nonfinite_weights_are_stored_as_nonfinite():
    for bad in (np.nan, np.inf):
        q, k = np.random.default_rng(7).standard_normal((2, 1, 30, 4)).astype(np.float32)
        q[0, 12, 1] = bad
        part = ch.AttentionMatrix(q, k, causal=True)
        made = document_of(part, served=True)
        layer = made.header["runs"][0]["layers"][0]
        codes = made.arrays["0.most"][0]
        wrong = ~np.isfinite(np.asarray(part[0], np.float64))
        wrong[:, 0] = False  # the first key has a picture of its own
        assert (codes == images.NONFINITE).tolist() == wrong.tolist()
        finite = np.delete(np.asarray(part[0], np.float64), 12, 0)
        assert layer["largest"][0] == pytest.approx(finite.max())
        assert layer["reach"][0] == pytest.approx(end_of(finite))
        assert "nan" in part.to_svg()


@pytest.mark.parametrize(
    ("rules", "masked"),
    [
        ({}, False),
        ({"causal": True}, True),
        ({"mask": np.ones((1, 1, 9, 9), bool)}, False),
        ({"mask": np.arange(81).reshape(1, 1, 9, 9) != 80}, True),
        ({"kv_lengths": np.array([9])}, False),
        ({"kv_lengths": np.array([8])}, True),
        ({"window": (8, 8)}, False),
        ({"bias": np.zeros((H, 9, 9))}, False),
    ],
    ids=str,
)
def test_the_page_records_whether_any_key_is_masked(rules, masked):
    made = document_of(matrix(9, **rules))
    assert made.header["runs"][0]["layers"][0]["masked"] is masked


# the file


@pytest.mark.parametrize(
    ("tokens", "whole", "stored"), [(64, True, "float32"), (128, True, "bfloat16"), (256, False, "bfloat16")]
)
def test_a_page_has_the_numbers_that_fit_into_6_mb(tokens, whole, stored):
    rng = fresh()
    matrices = [ch.AttentionMatrix(*rng.standard_normal((2, 1, 12, tokens, 64), np.float32)) for _ in range(12)]
    layers = [long.ShownLayer(str(place), range(12), matrix) for place, matrix in enumerate(matrices)]
    made = long.document([long.ShownRun("run", layers)])
    exact = [layer["exact"] for layer in made.header["runs"][0]["layers"]]
    heads = sum(map(len, exact))
    assert (heads == 144) == whole
    assert exact == [list(range(max(0, min(12, heads - 12 * place)))) for place in range(12)]
    assert made.arrays["0.q"].dtype.name == stored
    assert 3e6 < len(long_page(made)) < 6e6


@pytest.mark.parametrize(
    ("q", "wish", "error", "words"),
    [
        (np.ones((4, 2)), {"batch": 3}, SelectionError, "batch 3 is outside 0..0"),
        (np.ones((0, 2)), {}, SelectionError, "no weights"),
    ],
)
def test_invalid_options_and_matrices_have_no_page(q, wish, error, words, tmp_path):
    with pytest.raises(error, match=words):
        ch.AttentionMatrix(q, q).save(tmp_path / "page.html", **wish)
    assert list(tmp_path.iterdir()) == []


def test_a_watched_model_is_saved_as_a_page(tmp_path):
    torch = pytest.importorskip("torch")
    from watched import build

    model = build("gpt2")
    with torch.no_grad(), ch.watch(model) as seen:
        model(torch.arange(12)[None])
    seen.save(tmp_path / "page.html", language="zh")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    header = header_of(text)
    assert header["language"] == "zh"
    assert header["runs"][0]["tokens"] == [str(token) for token in range(12)]


def test_a_notebook_shows_a_page_of_fewer_heads(monkeypatch):
    part = matrix(300, heads=6, kv=6, d=64, causal=True)
    monkeypatch.setattr(page, "MOST_BYTES", 400_000)
    shown = part._repr_mimebundle_()["text/html"]
    assert len(part.to_html()) > 400_000
    assert "<iframe" in shown
    assert len(shown) < 500_000
    header = header_of(html.unescape(shown))
    assert header["runs"][0]["layers"][0]["exact"] == [0]


def test_each_picture_has_its_own_caption(small):
    for tokens in (None, TOKENS):
        drawn = small[0].to_svg(1, tokens=tokens)
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
        end = end_of(small[0][0, 1].astype(np.float64))
        assert texts[-3:] == [
            "A, head 1",
            f"0 to {end:.3g} by the square root;",
            f"{end:.3g}: 90th percentile of the rows&#x27; largest weights, row 0 left out",
        ]
        axes = small[0].plot(1, tokens=tokens)
        np.testing.assert_array_equal(axes.images[0].get_array().filled(0), small[0][0, 1])
        assert tokens is None or [label.get_text() for label in axes.get_xticklabels()] == [x.strip() for x in TOKENS]
    assert "the largest of 11×15 in a pixel" in matrix(700, 900).to_svg()
    hostile = matrix(len(HOSTILE)).to_svg(tokens=list(HOSTILE))
    assert "<script" not in hostile
    assert "<img" not in hostile


def test_a_notebook_gets_text_a_picture_and_a_frame(small):
    trace = ch.trace(np.eye(2), np.eye(2), np.eye(2))
    for whole, words in ((small[0], "AttentionMatrix("), (trace, "S = Q·Kᵀ")):
        bundle = whole._repr_mimebundle_()
        assert set(bundle) == {"text/plain", "image/svg+xml", "text/html"}
        assert bundle["text/html"].startswith('<iframe sandbox="allow-scripts allow-downloads"')
        assert words in bundle["text/plain"]
    large = ch.AttentionMatrix(np.ones((20000, 2), np.float32), np.ones((20000, 2), np.float32))._repr_mimebundle_()
    assert "save(" in large["text/html"]
    assert "_logsumexp" not in large  # and no weights were computed
    more = ch.AttentionMatrix(np.ones((64, 2)), np.ones((64, 2)), causal=True)._repr_mimebundle_()
    assert set(more) == {"text/plain", "text/html"}  # a picture of so many cells is as long as the page
    assert set(ch.AttentionMatrix(np.ones((0, 2)), np.ones((3, 2)))._repr_mimebundle_()) == {"text/plain"}
