"""The rooms of a page in a real browser: one place in all of them, and the arithmetic of its weight."""

import re

import numpy as np
import pytest

import clearhead as ch
from browser import opened, until
from clearhead.explaining.steps import steps_of_text
from clearhead.models import model as gpt2
from clearhead.view.long import ShownLayer, ShownRun, document
from clearhead.view.page import encoded
from page_files import header_of
from seeds import fresh

TEXT = "mary had a little lamb its fleece"


@pytest.fixture(scope="module")
def seen():
    return steps_of_text(TEXT, gpt2.load())


def results(page):
    """The last number of each line of the arithmetic, by the line's heading, without a bound."""
    lines = page.locator(".lines li").all()
    result = {}
    for line in lines:
        name = line.locator("> small").text_content()
        bold = line.locator(".written:not(.ghost) b")
        result[name] = bold.last.text_content() if bold.count() else line.locator(".written").first.text_content()
    return {
        name: text.replace("−", "-") if "[" in text else text.replace("−", "-").split(" ±")[0]
        for name, text in result.items()
    }


def vector(text):
    """The numbers of the last bracket, without their bounds."""
    plain = re.sub(r" ± \S+", "", text[text.rindex("[") :]).replace("−", "-")
    return [float(x) for x in re.findall(r"-?[\d.]+(?:e-?\d+)?", plain)]


def settled(page):
    until(page, "document.querySelectorAll('.lines li').length > 3")
    page.wait_for_timeout(250)


def cells_of(page):
    """The token that is coloured most: the shade of the scale ends in its darkest colour in a light theme."""
    return page.evaluate(
        """() => [...document.querySelectorAll('.passage .token')].map((each) => {
            const parts = (each.style.backgroundColor.match(/\\d+/g) ?? [255, 255, 255]).map(Number);
            return parts[0] + parts[1] + parts[2];
        })"""
    )


# the document


def test_a_page_of_steps_stores_the_arrays_of_its_runs_once(seen):
    header = header_of(seen.to_html())
    assert header["kind"] == "attention"
    (run,) = header["runs"]
    assert [len(layer["heads"]) for layer in run["layers"]] == [8, 8]
    assert run["tokens"] == header["tokens"]
    places = header["arrays"]
    for layer, steps in zip(run["layers"], header["layers"], strict=True):
        for name in ("q", "k", "v"):
            assert places[layer["arrays"][name]]["at"] == places[steps["arrays"][name]]["at"], name
        assert all(set(caption) == {"en", "zh"} for caption in layer["captions"])
    assert len(header["facts"]["following"]) == len(header["tokens"])
    assert header["facts"]["following"][-1][0][0] == seen.next[0].text


def test_each_batch_item_is_a_run_and_no_weights_are_no_run():
    rng = fresh()
    q, k, v = rng.standard_normal((3, 2, 3, 4, 5))
    header = header_of(ch.trace(q, k, v).to_html())
    assert [run["batch"] for run in header["runs"]] == [0, 1]
    empty = ch.trace(np.ones((2, 3)), np.ones((0, 3)), np.ones((0, 2))).to_html()
    assert header_of(empty)["runs"] == []


# one place


def test_a_word_a_head_and_a_cell_are_chosen_in_all_rooms(running, seen):
    with opened(running, seen.to_html(), wait=".map-of") as page:
        settled(page)
        weights = {
            (layer, head): np.asarray(ch.AttentionMatrix(run.q, run.k, **run.rules)[head], np.float64)
            for layer, run in enumerate(seen.runs)
            for head in range(8)
        }
        local = weights[seen.layer, seen.head]
        word = page.locator('.token[data-token="4"]')
        word.hover()
        page.wait_for_timeout(200)
        assert int(np.argmin(cells_of(page))) == int(local[4].argmax())
        assert f"after “{seen.tokens[4].text.strip()}”" in page.locator(".next-of h2").text_content()
        following = [each.text.replace(" ", "␣") for each in seen.following[4]]
        shown = page.locator(".next-of bdi").all_text_contents()
        assert [text.replace("⏎", "\n") for text in shown] == following
        page.mouse.move(2, 2)
        page.wait_for_timeout(200)
        assert int(np.argmin(cells_of(page))) == int(local[-1].argmax())
        word.click()
        until(page, "document.querySelector('#readout').textContent.startsWith('query 4 ')")
        until(page, "document.querySelector('#pick-query').value === '4'")
        page.locator('.heads .head[data-place="0 5"]').click()
        until(page, "document.querySelector('#head').textContent === 'Layer 0, head 5'")
        assert page.locator("#pick-layer").input_value() == "0"
        assert page.locator("#pick-head").input_value() == "5"
        page.locator("#pick-head").select_option("2")
        until(page, "document.querySelector('#head').textContent === 'Layer 0, head 2'")
        settled(page)
        assert page.locator('.heads .head[data-place="0 2"]').get_attribute("aria-pressed") == "true"
        i, j = 4, int(re.search(r"key (\d+)", page.locator("#readout").text_content())[1])
        assert float(results(page)["softmax"]) == pytest.approx(weights[0, 2][i, j], rel=1e-3)
        until(page, "[...document.querySelectorAll('.heads canvas')].every((each) => each.dataset.missing === '0')")
        assert page.locator(".heads .head").count() == 16
        assert page.locator(".heads canvas").count() == 2  # a layer's pictures share one


# the arithmetic

RULES = {
    "plain": {},
    "causal with a cap": {"causal": True, "softcap": 2.0, "scale": 0.7},
    "biases and a sink": {"alibi_slopes": np.array([0.3]), "sinks": np.array([0.4])},
}


@pytest.mark.parametrize("rules", RULES)
def test_each_line_of_the_arithmetic_is_the_references_number(running, rules):
    rng = fresh()
    n, d = int(rng.integers(3, 9)), int(rng.integers(2, 9))
    q, k, v = (rng.standard_normal((1, n, width)) for width in (d, d, 3))
    trace = ch.trace(q, k, v, **RULES[rules])
    i = int(rng.integers(1, n))
    j = int(rng.integers(0, i))
    with opened(running, trace.to_html(), wait=".map-of", place=f"#at=0.0.0&cell={i}.{j}") as page:
        settled(page)
        result = results(page)
        terms = [float(x.replace("−", "-")) for x in page.locator(".lines .term .num.role-key").all_text_contents()]
        assert len(terms) == (d if d <= 6 else 5)
        assert all(np.isclose(k[0, j], x, rtol=1e-3, atol=1e-4).any() for x in terms)
        assert float(result["dot product"]) == pytest.approx(trace.scores[0, i, j], rel=1e-3, abs=1e-4)
        assert float(result["scaled"]) == pytest.approx(trace.scaled[0, i, j], rel=1e-3, abs=1e-4)
        assert float(result["log-sum-exp over the keys"]) == pytest.approx(trace.logsumexp[0, i], rel=1e-3, abs=1e-4)
        assert float(result["softmax"]) == pytest.approx(trace.weights[0, i, j], rel=1e-3, abs=1e-7)
        mixed = trace.weights[0, i, j] * v[0, j]
        assert vector(result["weight times value"]) == pytest.approx(mixed, rel=6e-3, abs=1e-4)
        assert vector(result["output: the sum over all keys"]) == pytest.approx(trace.output[0, i], rel=6e-3, abs=1e-4)


def test_nan_infinity_and_any_script_are_shown_as_they_are(running):
    rng = fresh()
    q, k, v = (rng.standard_normal((2, 6, 4)) for _ in range(3))
    q[0, 2, 1], k[1, 3, 0], v[0, 1, 2] = np.nan, np.inf, np.nan
    tokens = ["<b>x</b>", "שלום", "👩‍👩‍👧", "\u202eevil", "</script>", "नमस्ते"]
    html = ch.trace(q, k, v, causal=True).to_html(tokens=tokens)
    with opened(running, html, wait=".map") as page:
        assert page.locator(".heads .head").first.get_attribute("aria-label").endswith("not known")
        read = page.locator("#readout")
        page.locator(".passage .token").nth(1).click()
        until(page, "document.querySelector('#readout').textContent.includes('1 “שלום”')")
        assert "query \u20681 “שלום”\u2069 → key" in read.text_content()  # isolated, since it turns its neighbours
        assert "<b>x</b>" in page.locator(".passage").inner_text()
    with opened(running, html, wait=".map", place="#at=0.0.0&cell=2.1") as page:
        until(page, "document.querySelector('#readout').textContent.includes('NaN')")
        settled(page)
        assert "NaN" in page.locator(".lines").inner_text()


PLACES = """() => {
    const canvases = [...document.querySelectorAll('.heads canvas')].map((each) => each.getBoundingClientRect());
    return [...document.querySelectorAll('.heads .head')].map((each) => {
        const [layer, head] = each.dataset.place.split(' ').map(Number);
        const { left, top, width } = each.getBoundingClientRect();
        return [layer, head, left - canvases[layer].left, top - canvases[layer].top, width, canvases[layer].width];
    });
}"""


@pytest.mark.parametrize(("layers", "heads", "width"), [(3, 4, 1280), (6, 12, 1280), (6, 12, 320)])
def test_each_head_lies_on_its_picture_in_its_layers_canvas(running, tmp_path, layers, heads, width):
    rng = fresh()
    matrices = [ch.AttentionMatrix(*rng.standard_normal((2, heads, 5, 3))) for _ in range(layers)]
    shown = [ShownLayer(str(place), range(heads), each.part(0)) for place, each in enumerate(matrices)]
    (tmp_path / "page.html").write_bytes(encoded(document([ShownRun("", shown, None)])))
    with opened(running, tmp_path / "page.html", width=width, wait=".map-of") as page:
        for media in ("screen", "print"):
            page.emulate_media(media=media)
            places = page.evaluate(PLACES)
            assert len(places) == layers * heads
            for _, head, left, top, side, whole in places:
                cell = whole / heads
                assert left == pytest.approx(cell * (head + 3 / 70), abs=0.6)
                assert (top, side) == pytest.approx((cell * 3 / 70, cell * 64 / 70), abs=0.6)
