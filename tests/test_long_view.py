"""The long view: its file, what it computes, and how it behaves in a real browser."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
from browser import browser, opened, until
from clearhead.core.arrays import bfloat16
from clearhead.errors import DtypeError, FileError, RuleError, SelectionError
from clearhead.view import head_summary, long, notebook, picture, pixels
from clearhead.view.parts import one_sequence
from clearhead.view.tiles import tile
from test_page import HOSTILE

SCRIPT = Path(__file__).parents[1] / "page/check/tiles.js"
AXE = Path(__file__).parents[1] / "page/node_modules/axe-core/axe.min.js"
TEXT = [
    "the",
    "cat",
    "sat",
    "un|believ|ably",
    "still",
    "on",
    "the",
    "mat",
    "and",
    "looked",
    "at",
    "猫",
    "and",
    "then",
    "it",
    "rained",
    "all",
    "day",
    "out|side",
]
TOKENS = [part if at else f" {part}" for word in TEXT for at, part in enumerate(word.split("|"))]
B, H, KV, D = 2, 4, 2, 6
RNG = np.random.default_rng(8)


def matrix(n, m=None, heads=H, kv=KV, d=D, dtype=np.float32, seed=1, **rules):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((1, heads, n, d)).astype(dtype), rng.standard_normal((1, kv, m or n, d)).astype(dtype)
    return ch.AttentionMatrix(q, k, **rules)


def document_of(part, tokens=None, **wish):
    run = long.ShownRun("run", [long.ShownLayer("0", range(part.shape[1]), one_sequence(part, 0))], tokens)
    return long.document([run], long.PageOptions(**wish))


@pytest.fixture(scope="module")
def running():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def small():
    """Two layers of 4 heads on a text of 24 tokens."""
    return [matrix(len(TOKENS), seed=seed, causal=True) for seed in (1, 2)]


@pytest.fixture(scope="module")
def written(small, tmp_path_factory):
    place = tmp_path_factory.mktemp("long") / "page.html"
    layers = [long.ShownLayer(str(at), range(H), one_sequence(part, 0)) for at, part in enumerate(small)]
    run = long.ShownRun("run", layers, TOKENS)
    place.write_bytes(long_page(long.document([run], long.PageOptions(title="a text"))))
    return place


def long_page(document):
    from clearhead.view import page

    return page.encoded(document)


# the pictures


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 9))
def test_a_picture_holds_the_largest_and_the_mean_weight_of_each_pixel(n, m, side, causal, seed):
    rules = {"causal": True, "query_offset": m - n} if causal else {}
    part = matrix(n, m, seed=seed, **rules)
    weights = part[0].astype(np.float64)
    found = pixels.pictures(one_sequence(part, 0), side)
    rows, cols = (np.arange(min(side, size) + 1) * size // min(side, size) for size in (n, m))
    alone = weights.copy()
    alone[:, :, 0] = 0
    for r in range(len(rows) - 1):
        for c in range(len(cols) - 1):
            block = alone[:, rows[r] : rows[r + 1], cols[c] : cols[c + 1]]
            assert np.allclose(found.most[:, r, c], block.max((1, 2)), atol=1e-6)
            assert np.allclose(found.mean[:, r, c], block.mean((1, 2)), atol=1e-6)
        first = weights[:, rows[r] : rows[r + 1], 0]
        assert np.allclose(found.first_most[:, r], first.max(1), atol=1e-6)
        assert np.allclose(found.first_mean[:, r], first.mean(1), atol=1e-6)
    assert np.allclose(found.received, weights.sum(1), atol=1e-4)


def test_head_summaries_are_the_means_of_the_weights():
    part = matrix(30, causal=True)
    weights = part[0].astype(np.float64)
    found = head_summary.summarise_heads(part, part.observe(logsumexp=True))
    i, j = np.indices((30, 30))
    assert np.allclose(found.sink, weights[:, :, 0].mean(1), atol=1e-6)
    assert np.allclose(found.own, np.diagonal(weights, 0, 1, 2).mean(1), atol=1e-6)
    assert np.allclose(found.previous, np.diagonal(weights, -1, 1, 2).mean(1), atol=1e-6)
    assert np.allclose(found.distance, (weights * abs(i - j)).sum(2).mean(1), atol=1e-5)
    logs = np.log(weights, where=weights > 0, out=np.zeros_like(weights))
    assert np.allclose(found.entropy, -(weights * logs).sum(2).mean(1), atol=1e-5)


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


def computed(document, tmp_path, wanted):
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    place = tmp_path / "page.html"
    place.write_bytes(long_page(document))
    done = subprocess.run(["node", SCRIPT, place, json.dumps(wanted)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [np.float32, bfloat16], ids=str)
def test_a_tile_of_the_page_equals_the_matrix_within_its_stated_bound(rule, dtype, tmp_path):
    part = matrix(N, M, dtype=dtype, **RULES[rule])
    exact = [("0", 1), ("0", 3)]
    plain = [
        {"layer": 0, "head": head, "level": 0, "row": 0, "col": 0, "rule": "most", "words": False} for _, head in exact
    ]
    for (_, head), found in zip(exact, computed(document_of(part, exact=exact), tmp_path, plain), strict=True):
        page = np.array(found["tile"]).reshape(256, 256)[:N, :M]
        weights = np.asarray(part[0, head], np.float64)
        assert np.array_equal(
            page == -1, tile(one_sequence(part, 0), head, range(N + 1), range(M + 1), 1, "most") == -1
        )
        bounds = np.array(found["bounds"])[:, None]
        seen = page != -1
        assert (bounds < 1e-3).all()
        assert (abs(page - weights) <= bounds * weights + 1e-9)[seen].all()


@pytest.mark.parametrize("rule", ["most", "mean"])
@pytest.mark.parametrize("whole", [False, True], ids=["tokens", "words"])
def test_the_page_and_the_server_compute_the_same_pixels(rule, whole, tmp_path):
    part = matrix(len(TOKENS), causal=True)
    wanted = [
        {"layer": 0, "head": 2, "level": level, "row": 0, "col": 0, "rule": rule, "words": whole} for level in (0, 1, 2)
    ]
    for level, found in enumerate(computed(document_of(part, TOKENS), tmp_path, wanted)):
        rows, cols = (edges or range(len(TOKENS) + 1) for edges in found["edges"])
        expected = tile(one_sequence(part, 0), 2, list(rows), list(cols), 2**level, rule)
        page = np.array(found["tile"]).reshape(256, 256)[: expected.shape[0], : expected.shape[1]]
        assert np.allclose(page, expected, atol=1e-6)
    if whole:
        assert len(rows) - 1 == len(TEXT)
        weights = np.asarray(part[0, 2], np.float64)
        assert tile(one_sequence(part, 0), 2, [3, 6], [3, 6], 1, "mean")[0, 0] == pytest.approx(
            weights[3:6, 3:6].sum() / 3
        )


def test_rounded_queries_and_keys_state_a_wider_bound_that_holds(tmp_path):
    part = matrix(N, M)
    (found,) = computed(
        document_of(part, dtype="bfloat16"),
        tmp_path,
        [{"layer": 0, "head": 0, "level": 0, "row": 0, "col": 0, "rule": "most", "words": False}],
    )
    page = np.array(found["tile"]).reshape(256, 256)[:N, :M]
    off = abs(page - part[0, 0]) / part[0, 0]
    assert off.max() > 1e-4
    assert (off <= np.array(found["bounds"])[:, None]).all()
    assert np.allclose(page.sum(1), 1, atol=1e-5)  # the log-sum-exp is that of the rounded queries and keys


def in_node(wanted):
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    script = SCRIPT.with_name("numbers.js")
    done = subprocess.run(["node", script, json.dumps(wanted)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_page_and_pictures_end_their_colour_scale_at_the_same_weight(small):
    rng = np.random.default_rng(4)
    peaks = [rng.random(size).astype(np.float32) for size in (0, 1, 2, 9, 10, 11, 20, 21, 99, 500) for _ in range(9)]
    for row in peaks:
        row[rng.random(len(row)) < 0.1] = 0
        row[rng.random(len(row)) < 0.1] = np.nan
    asked = [[str(x) for x in row.astype(np.float64)] for row in peaks]
    assert in_node({"reach": asked})["reach"] == [picture.reach(row) for row in peaks]
    weights = np.asarray(small[0][0], np.float64)
    assert picture.reach(weights[1].max(1)) == pytest.approx(end_of(weights[1]))
    assert picture.reach(np.array([1.0, 0.2])) == 0.2
    assert picture.reach(np.array([0.7])) == 0.7
    assert picture.reach(np.array([np.nan])) == 1.0
    layer = document_of(small[0], TOKENS).header["runs"][0]["layers"][0]
    aside = weights.copy()
    aside[:, :, 0] = 0
    for name, of in (("whole", weights), ("aside", aside)):
        assert layer["reach"][name] == pytest.approx([end_of(head) for head in of], rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [None, "bfloat16"], ids=str)
def test_the_true_weight_lies_within_the_printed_interval(seed, dtype, tmp_path):
    """Compared with float64 weights of the unrounded inputs."""
    part = matrix(N, M, seed=seed, d=16)
    q, k = np.asarray(part.factors.q[0, 1], np.float64), np.asarray(part.factors.k[0, 0], np.float64)
    logits = q @ k.T / 4
    true = np.exp(logits - logits.max(1, keepdims=True))
    true /= true.sum(1, keepdims=True)
    wanted = {"layer": 0, "head": 1, "level": 0, "row": 0, "col": 0, "rule": "most", "words": False}
    (found,) = computed(document_of(part, dtype=dtype), tmp_path, [wanted])
    tiled = np.array(found["tile"]).reshape(256, 256)[:N, :M]
    pairs = [[tiled[i, j], tiled[i, j] * found["bounds"][i]] for i in range(N) for j in range(M)]
    outside = 0
    for said, truth in zip(in_node({"within": pairs})["within"], true.ravel(), strict=True):
        value, bound = map(float, said.split(" ± "))
        outside += not abs(truth - value) <= bound * (1 + 1e-9)
    assert outside == 0


def test_nonfinite_weights_are_stored_as_nonfinite():
    for bad in (np.nan, np.inf):
        q, k = np.random.default_rng(7).standard_normal((2, 1, 30, 4)).astype(np.float32)
        q[0, 12, 1] = bad
        part = ch.AttentionMatrix(q, k, causal=True)
        made = document_of(part, exact=[])
        layer = made.header["runs"][0]["layers"][0]
        codes = made.arrays["0.most"][0]
        wrong = ~np.isfinite(np.asarray(part[0], np.float64))
        wrong[:, 0] = False  # the first key has a picture of its own
        assert (codes == pixels.NONFINITE).tolist() == wrong.tolist()
        finite = np.delete(np.asarray(part[0], np.float64), 12, 0)
        assert layer["largest"]["most"][0] == pytest.approx(finite.max())
        assert layer["reach"]["whole"][0] == pytest.approx(end_of(finite))
        png = part.to_png()
        assert png.startswith(b"\x89PNG")
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


def test_the_same_matrix_gives_the_same_bytes(tmp_path):
    for name in "ab":
        matrix(20, causal=True).save(tmp_path / f"{name}.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_page_that_is_too_large_is_refused_early_and_the_error_says_what_fits():
    q = RNG.standard_normal((8, 40000, 128), dtype=np.float32)
    large = ch.AttentionMatrix(q, q, causal=True)
    with pytest.raises(SelectionError, match=r"about \d+ MB with 8 exact heads") as caught:
        large.save("nowhere.html")
    assert "exact=[('', 0)]" in caught.value.hint
    assert "dtype='bfloat16' halves it" in caught.value.hint


@pytest.mark.parametrize(
    ("wish", "error", "words"),
    [
        ({"exact": [("7", 0)]}, SelectionError, "no layer '7'"),
        ({"exact": [("", 9)]}, SelectionError, "no head 9"),
        ({"dtype": "int8"}, DtypeError, "a page holds"),
        ({"dtype": "nonsense"}, DtypeError, "a page holds"),
        ({"batch": 3}, SelectionError, "batch 3 is outside 0..0"),
    ],
)
def test_invalid_page_options_are_refused(wish, error, words, tmp_path):
    with pytest.raises(error, match=words):
        matrix(5).save(tmp_path / "page.html", **wish)
    assert list(tmp_path.iterdir()) == []


def test_numbers_too_large_for_the_dtype_are_refused(tmp_path):
    q = np.full((4, 2), 1e6, np.float32)
    with pytest.raises(DtypeError, match="too large for float16"):
        ch.AttentionMatrix(q, q).save(tmp_path / "page.html", dtype="float16")


def test_an_empty_matrix_has_no_page(tmp_path):
    with pytest.raises(SelectionError, match="no weights"):
        ch.AttentionMatrix(np.ones((0, 2)), np.ones((3, 2))).save(tmp_path / "page.html")


def test_a_watched_model_is_saved_as_a_page_or_a_file(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=12, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad(), ch.watch(model) as seen:
        model(torch.arange(12)[None])
    seen.save(tmp_path / "page.html", language="zh", exact=[(1, 0)])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    header = json.loads(re.search(r'id="clearhead">(.*?)</script>', text)[1])
    assert [layer["exact"] for layer in header["runs"][0]["layers"]] == [[], [0]]
    assert header["language"] == "zh"
    assert header["runs"][0]["tokens"] == [str(token) for token in range(12)]
    seen.save(tmp_path / "seen.safetensors")
    assert ch.load(tmp_path / "seen.safetensors").to_html(language="zh", exact=[(1, 0)]) == seen.to_html(
        language="zh", exact=[(1, 0)]
    )
    with pytest.raises(RuleError, match="exact is for a page"):
        seen.save(tmp_path / "seen.safetensors", exact=[])
    with torch.no_grad(), ch.watch(model, keep=False) as nothing:
        model(torch.arange(12)[None])
    with pytest.raises(RuleError, match="without its queries"):
        nothing.save(tmp_path / "page2.html")
    assert not (tmp_path / "page2.html").exists()


# the browser


def state(page):
    """The current selection, read from the page's link."""
    page.wait_for_timeout(200)  # the link follows the selection after 150 ms
    return dict(part.split("=") for part in page.evaluate("location.hash").lstrip("#").split("&"))


def ready(page):
    until(
        page,
        "document.querySelector('#readout')?.textContent !== '' && "
        "document.querySelector('.map-of')?.dataset.missing === '0'",
    )


def show_all_controls(page):
    closed = page.locator("details.display:not([open]) > summary")
    while closed.count():
        closed.first.click()


def value_of(text):
    return float(re.search(r": ([\d.e-]+)", text)[1])


def difference_of(page):
    return float(page.locator("#readout").text_content().split("difference ")[1].replace("−", "-"))


def bar_below(page):
    """Height in pixels of the chosen key's bar in the profile below the map, with the whole map in view."""
    j = int(state(page)["cell"].split(".")[1])
    return page.evaluate(
        """([left, room]) => {
            const canvas = document.querySelector(".map-of canvas");
            const bytes = canvas.getContext("2d").getImageData(left, canvas.height - room, 1, room).data;
            return bytes.filter((alpha, at) => at % 4 === 3 && alpha > 127).length;
        }""",
        [88 + round((unit_of(j) + 0.5) / float(state(page)["view"].split("_")[2])), 44],
    )


def end_of(weights):
    """Where the colour scale ends: the second largest of ten rows' largest weights, without row 0."""
    peaks = sorted(float(row.max()) for row in weights[1:] if np.isfinite(row).all() and row.max() > 0)
    return peaks[len(peaks) - 1 - len(peaks) // 10]


def unit_of(token):
    return sum(text.startswith(" ") for text in TOKENS[1 : token + 1])


def test_it_opens_from_disk_without_a_network_a_request_or_an_error(running, written):
    with opened(running, written, wait=".map-of") as (page, unwanted):
        ready(page)
        assert page.locator(".heads .head").count() == 2 * H
        assert unwanted == []


def test_arrow_keys_move_and_the_numbers_are_those_of_the_matrix(running, written, small):
    with opened(running, written, wait=".map-of", place="#at=0.0.0") as (page, unwanted):
        ready(page)
        page.locator(".map-of").focus()
        layer, head = 0, 0
        for keys in (["ArrowUp"], ["ArrowLeft", "ArrowLeft"], ["]"], ["}"], ["Shift+ArrowUp"], ["["], ["Enter"]):
            for key in keys:
                page.keyboard.press(key)
            page.wait_for_timeout(150)
            ready(page)
            layer, head = map(int, state(page)["at"].split(".")[1:])
            i, j = map(int, state(page)["cell"].split("."))
            text = page.locator("#readout").text_content()
            assert text.startswith(f"query {i} “{TOKENS[i].strip()}” → key {j}")
            expected = small[layer][0, head, i, j]
            assert value_of(text) == pytest.approx(expected, rel=2e-3) if j <= i else "masked" in text
        assert (layer, head) == (1, 0)
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "search"
        page.keyboard.type("Rain")
        page.keyboard.press("Enter")
        until(page, f"document.querySelector('#readout').textContent.startsWith('query {TOKENS.index(' rained')} ')")
        assert "1 of 1" in page.locator(".text").text_content()
        until(page, "document.querySelector('.live').textContent.startsWith('query')")
        assert unwanted == []


def test_pointing_shows_a_weight_and_a_click_pins_it(running, written, small):
    with opened(running, written, wait=".map-of", place="#at=0.0.0") as (page, _):
        ready(page)
        box = page.locator(".map-of canvas").bounding_box()
        page.mouse.move(box["x"] + 130, box["y"] + 400)
        page.wait_for_timeout(200)
        i, j = map(int, state(page)["cell"].split("."))
        assert value_of(page.locator("#readout").text_content()) == pytest.approx(small[0][0, 0, i, j], rel=2e-3)
        page.mouse.click(box["x"] + 130, box["y"] + 400)
        page.mouse.move(box["x"] + 300, box["y"] + 300)
        page.wait_for_timeout(200)
        assert state(page)["cell"] == f"{i}.{j}"


def test_tables_lists_words_and_differences_show_the_same_numbers(running, written, small):
    with opened(running, written, wait=".map-of", place="#at=0.0.2&cell=20.4") as (page, unwanted):
        ready(page)
        weights = small[0][0, 2].astype(np.float64)
        page.locator("details.numbers summary").click()
        page.wait_for_selector("details.numbers td")
        shown = page.locator("details.numbers tbody tr").first.locator("td").all_text_contents()
        assert [float(x) for x in shown] == pytest.approx(weights[13, :9], rel=6e-3, abs=1e-6)
        best = page.locator(".strongest.role-query .place").all_text_contents()
        assert [int(place) for place in best] == list(np.argsort(-weights[20])[:10])
        show_all_controls(page)
        page.check("#words")
        page.wait_for_timeout(300)
        ready(page)
        text = page.locator("#readout").text_content()
        assert "“unbelievably”" in text
        starts = [0, *(at for at in range(1, len(TOKENS)) if TOKENS[at].startswith(" "))]
        word = starts.index(20) if 20 in starts else max(at for at, start in enumerate(starts) if start <= 20)
        ends = [*starts[1:], len(TOKENS)]
        expected = weights[starts[word] : ends[word], 3:6].sum() / (ends[word] - starts[word])
        assert value_of(text) == pytest.approx(expected, rel=2e-3)
        assert bar_below(page) == pytest.approx(44 * (expected / end_of(weights)) ** 0.5, abs=1)
        show_all_controls(page)
        page.select_option("#other", "0 1 2")
        page.wait_for_timeout(400)
        ready(page)
        minus = small[1][0, 2, starts[word] : ends[word], 3:6].sum() / (ends[word] - starts[word])
        assert difference_of(page) == pytest.approx(expected - minus, abs=1e-3)
        page.select_option("#other", "")
        page.wait_for_timeout(300)
        page.uncheck("#words")
        show_all_controls(page)
        page.select_option("#other", "0 1 2")
        page.wait_for_timeout(400)
        ready(page)
        i, j = map(int, state(page)["cell"].split("."))
        assert difference_of(page) == pytest.approx(weights[i, j] - small[1][0, 2, i, j], abs=1e-3)
        assert unwanted == []


def test_a_search_goes_on_after_a_match_within_a_word(running, written):
    with opened(running, written, wait=".map-of", place="#at=0.0.0&cell=0.0&show=most.sqrt.0.1") as (page, _):
        ready(page)
        page.fill("#search", "i")
        places = [at for at, text in enumerate(TOKENS) if "i" in text]
        assert any(not TOKENS[at].startswith(" ") for at in places)
        for keys, order in (("Enter", [1, 2, 3, 4, 5, 1]), ("Shift+Enter", [5, 4, 3])):
            for at in order:
                page.press("#search", keys)
                until(page, f"document.querySelector('.text').textContent.includes('{at} of {len(places)}')")


def words_of(weights, starts):
    """The weight between words: the sum over the keys and the mean over the queries of each word."""
    ends = [*starts[1:], len(weights)]
    return np.array([[weights[a:b, c:d].sum() / (b - a) for c, d in zip(starts, ends)] for a, b in zip(starts, ends)])  # noqa: B905


def test_whole_words_are_listed_shaded_and_searchable(running, written, small):
    starts = [0, *(at for at in range(1, len(TOKENS)) if TOKENS[at].startswith(" "))]
    weights = words_of(small[0][0, 2].astype(np.float64), starts)
    with opened(running, written, wait=".map-of", place="#at=0.0.2&cell=20.4&show=most.sqrt.0.1") as (page, unwanted):
        ready(page)
        i, j = unit_of(20), unit_of(4)
        for role, line in (("query", weights[i]), ("key", weights[:, j])):
            best = np.argsort(-line, kind="stable")[:10]
            best = best[line[best] > 0]
            places = page.locator(f".strongest.role-{role} .place").all_text_contents()
            assert [int(place) for place in places] == list(best)
            shares = page.locator(f".strongest.role-{role} .num").all_text_contents()
            assert [float(share.strip("%")) / 100 for share in shares] == pytest.approx(line[best], rel=0.01)
        assert page.locator(".strongest.role-query", has_text="unbelievably").count() == 1
        show_all_controls(page)
        page.select_option("#by", "query")
        colours = page.locator(".token").evaluate_all("all => all.map(each => each.style.background)")
        assert len({colours[at] for at in (3, 4, 5)}) == 1  # un, believ, ably
        page.fill("#search", "t")
        page.press("#search", "Enter")
        found = sum("t" in "".join(TOKENS[a:b]) for a, b in zip(starts, [*starts[1:], len(TOKENS)], strict=True))
        until(page, f"document.querySelector('.text').textContent.includes(' of {found}')")
        assert unwanted == []


def test_several_words_are_found_in_word_pieces(running, tmp_path):
    tokens = ["[CLS]", "the", "cat", "sat", "un", "##believ", "##ably", "still", ",", "it", "rained", "[SEP]"]
    place = tmp_path / "page.html"
    matrix(len(tokens)).save(place, tokens=tokens)
    with opened(running, place, wait=".map-of") as (page, _):
        ready(page)
        for words, token in (("the cat", 1), ("sat unbelievably", 3), ("believably still,", 5), ("it  rained", 9)):
            page.fill("#search", words)
            page.press("#search", "Enter")
            until(page, f"document.querySelector('#readout').textContent.startsWith('query {token} ')")
            assert "1 of 1" in page.locator(".text").text_content()


def test_tokens_take_the_focus_and_shortcuts_work_after_a_checkbox(running, written):
    with opened(running, written, wait=".map-of", place="#at=0.0.0&cell=20.4") as (page, _):
        ready(page)
        assert page.locator('.token[tabindex="0"]').count() == 1
        page.locator('.token[tabindex="0"]').focus()
        for key in ("ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowLeft", "Enter"):
            page.keyboard.press(key)
        until(page, "location.hash.includes('cell=18.4')")
        assert page.evaluate("document.activeElement.dataset.token") == "18"
        show_all_controls(page)
        page.check("#aside")
        page.wait_for_timeout(300)
        assert page.evaluate("document.activeElement.id") == "aside"
        page.keyboard.press("ArrowUp")
        until(page, "location.hash.includes('cell=17.4')")
        page.locator("#scale").focus()
        page.keyboard.press("]")
        until(page, "location.hash.includes('at=0.0.1')")


def test_the_legend_says_where_the_colour_scale_ends_and_what_is_shown(running, written, small, tmp_path):
    place = tmp_path / "page.html"
    matrix(30).save(place)
    with opened(running, written, wait=".map-of", place="#at=0.0.0") as (page, _):
        ready(page)
        end = end_of(small[0][0, 0].astype(np.float64))
        page.wait_for_timeout(300)
        legend = page.locator(".here .legend").text_content()
        assert float(re.search(r"≥ ([\d.]+)", legend)[1]) == pytest.approx(end, rel=6e-3)
        assert "90th percentile" in legend
        assert "query 0 left out" in legend
        assert "masked" in legend
        assert "NaN" not in legend
        page.select_option("#scale", "log")
        until(page, "document.querySelector('.here .legend').textContent.startsWith('≤ ')")
        low = float(re.match(r"≤ ([\d.e-]+)", page.locator(".here .legend").text_content())[1])
        assert low == pytest.approx(1e-4 * end, rel=0.1)
    with opened(running, place, wait=".map-of") as (page, _):
        ready(page)
        assert "masked" not in page.locator(".here .legend").text_content()


@pytest.mark.parametrize("exact", [None, []], ids=["computed", "pictured"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_weights_are_drawn_and_named(running, tmp_path, bad, exact):
    q, k = np.random.default_rng(7).standard_normal((2, 1, 40, 4)).astype(np.float32)
    q[0, 12, 1] = bad
    place = tmp_path / "page.html"
    part = ch.AttentionMatrix(q, k, causal=True)
    part.save(place, exact=exact, tokens=TOKENS + TOKENS[: 40 - len(TOKENS)])
    wrong = int(np.argmax(np.isnan(np.asarray(part[0, 12]))))
    with opened(running, place, wait=".map-of", place=f"#cell=12.{wrong}&at=0.0.0") as (page, unwanted):
        ready(page)
        until(page, "document.querySelector('.here .legend').textContent.includes('NaN or infinite')")
        page.wait_for_timeout(200)
        text = page.locator("#readout").text_content()
        assert "NaN · not a finite number" in text
        assert "sum to" not in text
        assert "∞" not in page.locator(".left").inner_text() + text
        yellow = """() => {
            const canvas = document.querySelector(".map-of canvas");
            const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let count = 0;
            for (let at = 0; at < bytes.length; at += 4)
                count += bytes[at] === 208 && bytes[at + 1] === 160 && bytes[at + 2] === 0;
            return count;
        }"""
        assert page.evaluate(yellow) > 20
        assert unwanted == []


def test_two_fingers_zoom_the_map(running, written):
    with opened(running, written, 390, 800, wait=".map-of", has_touch=True, is_mobile=True) as (page, unwanted):
        ready(page)
        canvas = page.locator(".map-of canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        x, y = box["x"] + 180, box["y"] + 180
        before = float(state(page)["view"].split("_")[2])
        fingers = page.context.new_cdp_session(page)
        for kind, spread in (("touchStart", 30), ("touchMove", 45), ("touchMove", 90), ("touchEnd", None)):
            points = [] if spread is None else [{"x": x - spread, "y": y, "id": 0}, {"x": x + spread, "y": y, "id": 1}]
            fingers.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
            page.wait_for_timeout(50)
        page.keyboard.press("Enter")  # updates the link
        page.wait_for_timeout(200)
        assert float(state(page)["view"].split("_")[2]) < before / 1.5
        assert unwanted == []


def test_the_readout_shows_the_weight_of_the_sink(running, tmp_path):
    place = tmp_path / "page.html"
    part = matrix(12, sinks=np.array([2.0, -np.inf, 0.0, 1.0]))
    part.save(place)
    with opened(running, place, wait=".map-of", place="#at=0.0.0&cell=5.3") as (page, _):
        ready(page)
        total = float(part[0, 0, 5].sum())
        said = re.search(r"sum to ([\d.]+); the sink takes ([\d.]+)", page.locator("#readout").text_content())
        assert [float(x) for x in said.groups()] == pytest.approx([total, 1 - total], rel=1e-3)
        page.keyboard.press("]")
        until(page, "document.querySelector('#readout').textContent.includes('sum to 1')")
        assert "sink" not in page.locator("#readout").text_content()


def test_search_looks_in_the_text_that_is_shown(running, small, tmp_path):
    place = tmp_path / "page.html"
    runs = [
        long.ShownRun(name, [long.ShownLayer("0", range(H), one_sequence(small[0], 0))], texts)
        for name, texts in (("there", TOKENS), ("back", TOKENS[::-1]))
    ]
    place.write_bytes(long_page(long.document(runs, long.PageOptions())))
    with opened(running, place, wait=".map-of") as (page, unwanted):
        for run, texts in enumerate((TOKENS, TOKENS[::-1])):
            page.select_option("#run", str(run))
            page.wait_for_timeout(200)
            ready(page)
            page.fill("#search", "rained")
            page.press("#search", "Enter")
            found = f"query {texts.index(' rained')} "
            until(page, f"document.querySelector('#readout').textContent.startsWith('{found}')")
        assert unwanted == []


def test_enter_presses_the_button_that_has_the_focus(running, written):
    with opened(running, written, wait=".map-of") as (page, _):
        ready(page)
        page.locator(".heads .head").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        until(page, "location.hash.includes('at=0.1.0')")
        page.locator("details.numbers summary").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("details.numbers td")


def test_a_cell_chosen_while_a_smaller_layer_opens_lies_inside_that_layer(running, small, tmp_path):
    place = tmp_path / "page.html"
    layers = [
        long.ShownLayer(str(at), range(H), one_sequence(part, 0)) for at, part in enumerate((small[0], matrix(5)))
    ]
    place.write_bytes(long_page(long.document([long.ShownRun("", layers, None)], long.PageOptions())))
    with opened(running, place, wait=".map-of") as (page, unwanted):
        ready(page)
        press = "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'KEY', bubbles: true}))"
        page.evaluate("; ".join(press.replace("KEY", key) for key in ("}", "ArrowUp")))
        until(page, "document.querySelector('.where').textContent.includes('of 5')")
        page.wait_for_timeout(200)
        assert state(page)["cell"].startswith("4.")
        assert page.locator("#readout").text_content().startswith("query 4 ")
        assert unwanted == []


def test_only_heads_shown_by_the_same_method_are_subtracted(running, small, tmp_path):
    """Either both are computed or both are pictures; a small layer stored exactly has no pictures."""
    place = tmp_path / "page.html"
    layers = [long.ShownLayer(str(at), range(H), one_sequence(part, 0)) for at, part in enumerate(small)]
    wish = long.PageOptions(exact=[*(("0", head) for head in range(H)), ("1", 1)])
    place.write_bytes(long_page(long.document([long.ShownRun("", layers, TOKENS)], wish)))
    choices = "[...document.querySelectorAll('#other option')].map((option) => option.value)"
    with opened(running, place, wait=".map-of", place="#at=0.0.0&cell=20.0") as (page, unwanted):
        ready(page)
        assert page.evaluate(choices) == ["", *(f"0 0 {head}" for head in range(H)), "0 1 1"]
        show_all_controls(page)
        page.select_option("#other", "0 1 1")
        page.wait_for_timeout(300)
        page.locator(".heads .head").nth(H).click()
        until(page, "document.querySelector('.here').textContent.includes('stored as an image')")
        assert page.evaluate(choices) == ["", *(f"0 1 {head}" for head in range(H))]
        assert unwanted == []


def test_a_link_opens_the_cell_it_names(running, written):
    place = "#at=0.1.3&cell=9.2&by=sink&show=mean.log.1.0"
    with opened(running, written, wait=".map-of", place=place) as (page, _):
        ready(page)
        found = state(page)
        assert (found["at"], found["cell"], found["by"], found["show"]) == (
            "0.1.3",
            "9.2",
            "sink",
            "mean.log.1.0.weights",
        )
        assert page.locator("#scale").input_value() == "log"
        assert page.is_checked("#aside")
        page.locator(".heads .head").first.click()
        until(page, "location.hash.includes('at=0.0.0')")


def test_a_head_without_exact_weights_says_so_and_shows_its_picture(running, small, tmp_path):
    place = tmp_path / "page.html"
    place.write_bytes(long_page(document_of(small[0], TOKENS, exact=[("0", 1)])))
    with opened(running, place, wait=".map-of", place="#at=0.0.0&cell=20.0") as (page, unwanted):
        ready(page)
        assert "stored as an image" in page.locator(".here").text_content()
        found = re.search(r": ([\d.e-]+) ± ([\d.e-]+)", page.locator("#readout").text_content())
        assert abs(float(found[1]) - small[0][0, 0, 20, 0]) <= float(found[2]) * 1.1
        page.keyboard.press("]")
        until(page, "document.querySelector('.here').textContent.includes('every weight is computed')")
        assert unwanted == []


def test_markup_in_tokens_is_shown_as_text(running, tmp_path):
    place = tmp_path / "page.html"
    part = matrix(len(HOSTILE), causal=True)
    run = long.ShownRun(
        HOSTILE[0], [long.ShownLayer(HOSTILE[1], range(H), one_sequence(part, 0), note=HOSTILE[2])], list(HOSTILE)
    )
    place.write_bytes(long_page(long.document([run], long.PageOptions(title=HOSTILE[0]))))
    with opened(running, place, wait=".map-of") as (page, unwanted):
        ready(page)
        show_all_controls(page)
        page.check("#words")
        page.wait_for_timeout(300)
        assert page.evaluate("window.bad") is None
        assert page.locator("main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        assert unwanted == []


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (390, "light"),
        (1280, "dark"),
        pytest.param(390, "dark", marks=pytest.mark.slow),
        pytest.param(1280, "light", marks=pytest.mark.slow),
    ],
)
def test_axe_finds_no_accessibility_problem_and_nothing_is_cut_off(running, written, scheme, width):
    if not AXE.exists():
        pytest.skip("axe-core is not installed: npm ci in page/")
    options = {"color_scheme": scheme, "bypass_csp": True, "reduced_motion": "reduce"}
    with opened(running, written, width, wait=".map-of", **options) as (page, _):
        ready(page)
        page.locator("details.numbers summary").click()
        page.wait_for_selector("details.numbers td")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.evaluate(AXE.read_text(encoding="utf-8"))
        found = page.evaluate("axe.run().then(r => r.violations.map(v => v.id + ': ' + v.nodes[0].html.slice(0, 200)))")
        assert found == []


def test_each_language_is_translated_completely(running, written):
    with opened(running, written, wait=".map-of") as (page, _):
        ready(page)
        assert "every head" in page.locator("main").inner_text().lower()
        page.locator("#language").click()
        until(page, "document.querySelector('#readout')?.textContent.startsWith('查询')")
        words = page.locator("main").inner_text()
        latin = (
            set(re.findall(r"[A-Za-z]{3,}", words))
            - {part.strip() for part in TOKENS}
            - {"float", "log", "sum", "exp", "text", "softmax"}
            - {"save", "watch", "values", "True"}  # how to get the values, which this page has not
        )
        assert latin <= set("".join(TOKENS).split()) | {"unbelievably", "outside"}, latin


@pytest.mark.slow
def test_the_tab_stays_responsive_at_a_hundred_thousand_tokens(running, tmp_path):
    n = 100_000
    q, k = (RNG.standard_normal((1, n, 8), dtype=np.float32).astype(bfloat16) for _ in "qk")
    part = ch.AttentionMatrix(q, k, causal=True, window=(3000, 0))
    run = long.ShownRun("long", [long.ShownLayer("0", [0], one_sequence(part, 0))], [f" w{at}" for at in range(n)])
    place = tmp_path / "page.html"
    place.write_bytes(long_page(long.document([run], long.PageOptions())))
    assert place.stat().st_size < 8e6
    with opened(running, place, wait=".map-of") as (page, unwanted):
        for key in ("+", "+", "+", "+", "+", "+", "+", "+", "ArrowUp", "ArrowLeft"):
            page.keyboard.press(key)
        until(page, "document.querySelector('.where').textContent.includes('each cell is one weight')", patience=60_000)
        ready(page)
        i, j = map(int, state(page)["cell"].split("."))
        assert value_of(page.locator("#readout").text_content()) == pytest.approx(float(part[0, i, j]), rel=2e-3)
        assert unwanted == []


# in other formats


def test_a_notebook_shows_pictures_where_the_page_would_be_too_large(monkeypatch):
    part = matrix(300, heads=6, kv=6, d=64, causal=True)
    monkeypatch.setattr(notebook, "MOST_BYTES", 400_000)
    shown = part._repr_mimebundle_()["text/html"]
    assert len(part.to_html()) > 400_000
    assert "The page with every weight has" in shown
    assert "<iframe" in shown
    assert len(shown) < 500_000
    header = json.loads(re.search(r'id="clearhead">(.*?)</script>', html.unescape(shown))[1])
    assert header["runs"][0]["layers"][0]["exact"] == []


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
    hostile = matrix(len(HOSTILE)).to_svg(tokens=list(HOSTILE))
    assert "<script" not in hostile
    assert "<img" not in hostile


def test_a_notebook_gets_text_a_picture_and_a_frame(small):
    bundle = small[0]._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/svg+xml", "text/html"}
    assert bundle["text/html"].startswith('<iframe sandbox="allow-scripts allow-downloads"')
    large = ch.AttentionMatrix(np.ones((20000, 2), np.float32), np.ones((20000, 2), np.float32))._repr_mimebundle_()
    assert "save(" in large["text/html"]
    assert "_logsumexp" not in large  # and no weights were computed
    seen = small[0].observe(entropy=True, received=True, top=2)._repr_mimebundle_()
    assert set(seen) == {"text/plain", "image/svg+xml", "text/html"}
    assert "entropy" in seen["text/plain"]
    assert set(ch.AttentionMatrix(np.ones((0, 2)), np.ones((3, 2)))._repr_mimebundle_()) == {"text/plain"}


def test_pictures_and_plots_for_papers(small, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    assert small[0].to_png(1).startswith(b"\x89PNG")
    assert small[0].to_svg(3).startswith("<svg")
    big = ch.AttentionMatrix(RNG.standard_normal((700, 4)), RNG.standard_normal((900, 4)))
    assert "the largest of 11×15 in a pixel" in big.to_svg()
    for shape in ((700, 900), (30, 20)):
        part = ch.AttentionMatrix(RNG.standard_normal((shape[0], 4)), RNG.standard_normal((shape[1], 4)))
        ax = part.plot()
        assert ax.get_xlabel() == "key"
        assert np.isclose(ax.images[0].get_array().max(), part[...].max())
        assert np.isclose(ax.images[0].norm.vmax, end_of(np.asarray(part[...], np.float64)))
        assert "row 0 left out" in ax.figure.axes[1].get_ylabel()
    assert len(small[0].plot().images) == 1
    q = np.ones((5, 2))
    q[3, 0] = np.nan
    cells = ch.AttentionMatrix(q, np.ones((5, 2)), causal=True).plot().images[1].get_array()
    assert (cells[..., 3] > 0).sum() == 4  # the four keys that query 3 sees
    with pytest.raises(SelectionError, match="no head 9"):
        small[0].plot(9)


def test_the_command_line_writes_the_page_of_a_file(tmp_path, capsys):
    from clearhead.cli import main

    (tmp_path / "book.txt").write_text("humpty dumpty sat on a wall", encoding="utf-8")
    place = tmp_path / "page.html"
    assert main(["explain", "--file", str(tmp_path / "book.txt"), "--html", str(place), "--exact", "1.2,0.3"]) == 0
    assert "2 layers, 16 heads, 6 tokens" in capsys.readouterr().out.replace("\n", " ")
    header = json.loads(re.search(r'id="clearhead">(.*?)</script>', place.read_text(encoding="utf-8"))[1])
    assert [layer["exact"] for layer in header["runs"][0]["layers"]] == [[3], [2]]
    for wrong, words in (
        (["--file", str(tmp_path / "none.txt")], "does not exist"),
        (["text", "--file", str(tmp_path / "book.txt")], "one of them"),
        ([], "one of them"),
        (["text", "--exact", "1.2"], "for the page of a long text"),
        (["--file", str(tmp_path / "book.txt"), "--html", str(place), "--exact", "x"], "expected layer.head"),
    ):
        assert main(["explain", *wrong]) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "bytes.txt").write_bytes(b"ab\xff")
    assert main(["explain", "--file", str(tmp_path / "bytes.txt")]) == 2
    assert "byte 2 is 0xff" in capsys.readouterr().err


def test_a_failed_save_leaves_no_file(tmp_path):
    with pytest.raises(FileError, match="cannot be written"):
        matrix(4).save(tmp_path / "missing" / "page.html")
    assert list(tmp_path.iterdir()) == []
