"""The rooms of a page in a real browser: one place in all of them, and everything under what is supposed."""

import json
import re

import numpy as np
import pytest

import clearhead as ch
from browser import opened, until
from clearhead.explaining.steps import steps_of_text
from clearhead.models import model as gpt2
from clearhead.view.long import ShownLayer, ShownRun, document
from clearhead.view.page import encoded
from seeds import fresh
from test_page import scripts

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
    header = json.loads(scripts(seen.to_html())["clearhead"])
    assert (header["kind"], header["format"]) == ("attention", 2)
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
    header = json.loads(scripts(ch.trace(q, k, v).to_html())["clearhead"])
    assert [run["batch"] for run in header["runs"]] == [0, 1]
    empty = ch.trace(np.ones((2, 3)), np.ones((0, 3)), np.ones((0, 2))).to_html()
    assert json.loads(scripts(empty)["clearhead"])["runs"] == []


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
        assert float(result["log of the sum over the keys"]) == pytest.approx(trace.logsumexp[0, i], rel=1e-3, abs=1e-4)
        assert float(result["softmax"]) == pytest.approx(trace.weights[0, i, j], rel=1e-3, abs=1e-7)
        mixed = trace.weights[0, i, j] * v[0, j]
        assert vector(result["weight times value"]) == pytest.approx(mixed, rel=6e-3, abs=1e-4)
        assert vector(result["output: the sum over all keys"]) == pytest.approx(trace.output[0, i], rel=6e-3, abs=1e-4)


def test_suppositions_change_the_numbers_at_once_and_lead_back(running):
    rng = fresh()
    q, k, v = rng.standard_normal((3, 6, 4))
    options = {"wait": ".map-of", "place": "#at=0.0.0&cell=5.2", "reduced_motion": "reduce"}
    with opened(running, ch.trace(q, k, v, causal=True).to_html(), **options) as page:
        settled(page)
        before = results(page)

        def weight(query=q, key=k, mask=None, scale=None):
            allowed = np.tril(np.ones((6, 6), bool)) if mask is None else mask
            return ch.trace(query, key, v, mask=allowed, scale=scale).weights[5]

        def shown():
            return float(results(page)["softmax"])

        page.locator("#dive-temperature").evaluate("each => { each.value = 1; each.dispatchEvent(new Event('input')) }")
        assert shown() == pytest.approx(weight(scale=0.25)[2], rel=1e-3, abs=1e-6)
        assert page.locator(".lines .ghost", has_text=before["softmax"].replace("-", "−")[:4]).count() >= 1
        assert "temperature 2" in page.locator(".ribbon").text_content()
        page.locator(".dive .supposed button").click()
        assert results(page) == before
        assert page.locator(".ribbon").count() == 0
        page.check("#if-scale")
        assert shown() == pytest.approx(weight(scale=1.0)[2], rel=1e-3, abs=1e-6)
        assert page.is_checked("#dive-scale")
        page.uncheck("#dive-scale")
        page.check("#dive-causal")
        page.fill("#dive-window", "4")
        window = np.array([[j >= i - 3 for j in range(6)] for i in range(6)])
        assert shown() == pytest.approx(weight(mask=window)[2], rel=1e-3, abs=1e-6)
        page.locator(".dive .supposed button").click()
        page.check("#dive-edge")
        assert "masked" in results(page)["mask"]
        page.keyboard.press("Escape")
        page.locator(".map-of").focus()
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(300)
        cut = np.tril(np.ones((6, 6), bool))
        cut[5, 2] = False
        assert shown() == pytest.approx(weight(mask=cut)[1], rel=1e-3, abs=1e-6)
        page.locator(".dive .supposed button").click()
        other = q.copy()
        other[5, 0] = 1.5
        page.locator(".cells input").first.fill("1.5")
        assert shown() == pytest.approx(weight(query=other)[1], rel=1e-3, abs=1e-6)


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


TEMPERATURE = """each => { each.value = %s; each.dispatchEvent(new Event('input', { bubbles: true })) }"""
PICTURES = """() => [...document.querySelectorAll('.heads canvas')].flatMap((layer) => {
    const count = document.querySelectorAll('.heads .head').length / document.querySelectorAll('.heads canvas').length;
    const [one, wide] = [document.createElement('canvas'), layer.width / count];
    return [...Array(count).keys()].map((at) => {
        Object.assign(one, { width: wide, height: layer.height }).getContext('2d').drawImage(layer, -at * wide, 0);
        return one.toDataURL();
    });
})"""
SHADES = """() => [...document.querySelectorAll('.passage .token')].map((each) => each.style.backgroundColor)"""


def read(page, i, j):
    """The readout's weight of one cell, which the arrow keys choose."""
    page.locator(".map-of").focus()
    for _ in range(20):
        said = page.locator("#readout").text_content()
        a, b = (int(x) for x in re.match(r"query (\d+).*? → key (\d+)", said).groups())
        if (a, b) == (i, j):
            break
        page.keyboard.press("ArrowUp" if a > i else "ArrowDown" if a < i else "ArrowLeft" if b > j else "ArrowRight")
        page.wait_for_timeout(60)
    page.wait_for_timeout(100)
    value = re.search(r": (masked|\S+)", page.locator("#readout").text_content())[1]
    return 0.0 if value == "masked" else float(value.replace("−", "-"))


def listed(page):
    """The first list: its keys and percentages."""
    keys = page.locator(".strongest.role-query .place").all_text_contents()
    shares = page.locator(".strongest.role-query .num").all_text_contents()
    return {int(key): float(share.strip("%")) / 100 for key, share in zip(keys, shares, strict=True)}


def test_map_text_lists_and_thumbnail_show_the_supposed_weights(running, tmp_path):
    rng = fresh()
    q, k, v = (rng.standard_normal((2, 6, 4)) for _ in range(3))
    tokens = [f" w{i}" for i in range(6)]
    ch.trace(q, k, v, causal=True).save(tmp_path / "page.html", tokens=tokens)
    options = {"wait": ".map-of", "place": "#at=0.0.1&cell=5.2", "reduced_motion": "reduce"}
    with opened(running, tmp_path / "page.html", **options) as page:
        until(page, "[...document.querySelectorAll('.heads canvas')].every((each) => each.dataset.missing === '0')")
        ribbon = page.locator(".headed .supposed")
        assert ribbon.is_hidden()
        page.mouse.move(2, 2)
        pictures, shades, lists = page.evaluate(PICTURES), page.evaluate(SHADES), listed(page)
        place = page.locator(".map-of").bounding_box()
        for power in (1, -1.5):
            page.locator("#dive-temperature").evaluate(TEMPERATURE % power)
            until(page, "!document.querySelector('.headed .supposed').hidden")
            page.wait_for_timeout(250)
            temperature = float(f"{2**power:.3g}")
            weights = ch.trace(q, k, v, causal=True, scale=0.5 / temperature).weights[1]
            assert listed(page) == pytest.approx(
                {int(key): weights[5, key] for key in np.argsort(-weights[5]) if weights[5, key] > 0},
                rel=6e-2,
                abs=1e-4,
            )
            i, j = int(rng.integers(6)), int(rng.integers(6))
            assert read(page, i, j) == pytest.approx(weights[i, j], rel=6e-3, abs=1e-9)
            assert read(page, 5, 2) == pytest.approx(weights[5, 2], rel=6e-3)
            now = page.evaluate(PICTURES)
            assert now[1] != pictures[1]
            assert now[0] == pictures[0]
            assert page.evaluate(SHADES) != shades
        assert page.locator(".map-of").bounding_box() == place  # nothing moved
        page.check("#dive-causal")
        page.wait_for_timeout(250)
        weights = ch.trace(q, k, v, scale=0.5 / temperature).weights[1]
        assert read(page, 2, 4) == pytest.approx(weights[2, 4], rel=6e-3)
        read(page, 5, 2)
        page.locator(".headed .supposed button").click()
        until(page, "document.querySelector('.headed .supposed').hidden")
        page.wait_for_timeout(250)
        assert (page.evaluate(PICTURES), page.evaluate(SHADES), listed(page)) == (pictures, shades, lists)
        assert not page.is_checked("#dive-causal")


@pytest.mark.gate
def test_an_edited_number_is_of_its_head_and_a_rule_of_all(running, tmp_path):
    rng = fresh()
    q, k, v = rng.standard_normal((3, 2, 6, 4))
    ch.trace(q, k, v).save(tmp_path / "page.html")
    options = {"wait": ".map-of", "place": "#at=0.0.0&cell=5.2", "reduced_motion": "reduce"}
    with opened(running, tmp_path / "page.html", **options) as page:
        until(page, "[...document.querySelectorAll('.heads canvas')].every((each) => each.dataset.missing === '0')")
        page.locator(".cells input").first.fill("3.5")
        page.check("#dive-scale")
        page.wait_for_timeout(250)
        changed = q.copy()
        changed[0, 5, 0] = 3.5
        assert read(page, 5, 1) == pytest.approx(ch.trace(changed, k, v, scale=1).weights[0, 5, 1], rel=6e-3)
        before = page.evaluate(PICTURES)
        page.locator('.heads .head[data-place="0 1"]').click()
        until(page, "document.querySelector('#head').textContent.endsWith('1')")
        page.wait_for_timeout(300)
        assert read(page, 5, 1) == pytest.approx(ch.trace(q, k, v, scale=1).weights[1, 5, 1], rel=6e-3)
        assert page.evaluate(PICTURES)[0] != before[0]  # as it ran again
        page.locator("#language").click()
        page.wait_for_timeout(500)
        assert page.locator(".headed .supposed").is_visible()
        assert page.is_checked("#dive-scale")


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
