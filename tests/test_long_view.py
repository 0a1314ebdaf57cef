"""The long view in a real browser: pointer, keyboard, fingers, links, padding, a hundred thousand tokens."""

import re
from contextlib import contextmanager

import numpy as np
import pytest

import clearhead as ch
from browser import opened, until
from clearhead.core.arrays import bfloat16
from clearhead.view import long
from long_pages import TOKENS, H, document_of, end_of, long_page, matrix, two_layers
from page_files import HOSTILE
from seeds import fresh

small = pytest.fixture(two_layers, scope="module")


@pytest.fixture(scope="module")
def written(small, tmp_path_factory):
    place = tmp_path_factory.mktemp("long") / "page.html"
    layers = [long.ShownLayer(str(index), range(H), part.part(0)) for index, part in enumerate(small)]
    run = long.ShownRun("run", layers, TOKENS)
    place.write_bytes(long_page(long.document([run], title="a text")))
    return place


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


@contextmanager
def mapped(running, page, *size, **options):
    """A page whose map is drawn."""
    with opened(running, page, *size, wait=".map-of", **options) as shown:
        ready(shown)
        yield shown


def value_of(text):
    return float(re.search(r": ([\d.e-]+)", text)[1])


def test_pointer_and_arrow_keys_move_and_the_numbers_are_those_of_the_matrix(running, written, small):
    with mapped(running, written, place="#at=0.0.0") as page:
        assert page.locator(".heads .head").count() == 2 * H
        box = page.locator(".map-of canvas").bounding_box()
        page.mouse.move(box["x"] + 130, box["y"] + 400)
        page.wait_for_timeout(200)
        i, j = map(int, state(page)["cell"].split("."))
        assert value_of(page.locator("#readout").text_content()) == pytest.approx(small[0][0, 0, i, j], rel=2e-3)
        page.mouse.click(box["x"] + 130, box["y"] + 400)
        page.mouse.move(box["x"] + 300, box["y"] + 300)
        page.wait_for_timeout(200)
        assert state(page)["cell"] == f"{i}.{j}"
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
        until(page, "document.querySelector('.live').textContent.startsWith('query')")


def test_tables_and_lists_show_the_same_numbers(running, written, small):
    with mapped(running, written, place="#at=0.0.2&cell=20.4") as page:
        weights = small[0][0, 2].astype(np.float64)
        page.locator("details.numbers summary").click()
        page.wait_for_selector("details.numbers td")
        first = page.locator("details.numbers tbody tr").first
        shown, row = first.locator("td").all_text_contents(), int(first.locator("th").text_content().split()[0])
        numbers = [0 if x == "masked" else float(x) for x in shown]
        assert numbers == pytest.approx(weights[row, : len(shown)], rel=6e-3, abs=1e-6)
        best = page.locator(".strongest.role-query .place").all_text_contents()
        assert [int(place) for place in best] == list(np.argsort(-weights[20])[:10])
        expected = weights[20, 4]
        assert value_of(page.locator("#readout").text_content()) == pytest.approx(expected, rel=2e-3)
        shares = page.locator(".strongest.role-query .num").all_text_contents()
        assert [float(share.strip("%")) / 100 for share in shares] == pytest.approx(
            np.sort(weights[20])[:-11:-1], rel=0.01
        )


def test_tokens_take_the_focus_and_a_link_opens_the_cell_it_names(running, written):
    with mapped(running, written, place="#at=0.0.0&cell=20.4") as page:
        assert page.locator('.token[tabindex="0"]').count() == 1
        page.locator('.token[tabindex="0"]').focus()
        for key in ("ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowLeft", "Enter"):
            page.keyboard.press(key)
        until(page, "location.hash.includes('cell=18.4')")
        assert page.evaluate("document.activeElement.dataset.token") == "18"
        page.keyboard.press("]")
        until(page, "location.hash.includes('at=0.0.1')")
        page.evaluate("location.hash = '#at=0.1.3&cell=9.2&show=weights'")
        page.reload()
        ready(page)
        result = state(page)
        named = {"at": "0.1.3", "cell": "9.2", "show": "weights"}
        assert {name: result[name] for name in named} == named
        page.locator(".heads .head").first.click()
        until(page, "location.hash.includes('at=0.0.0')")


def test_the_legend_says_where_the_colour_scale_ends(running, written, small, tmp_path):
    place = tmp_path / "page.html"
    matrix(30).save(place)
    with mapped(running, written, place="#at=0.0.0") as page:
        end = end_of(small[0][0, 0].astype(np.float64))
        page.wait_for_timeout(300)
        legend = page.locator(".here .legend").text_content()
        assert float(re.search(r"≥ ([\d.]+)", legend)[1]) == pytest.approx(end, rel=6e-3)
        assert "90th percentile" in legend
        assert "not counting query 0" in legend
        assert "masked" in legend
        assert "NaN" not in legend
    with mapped(running, place) as page:
        assert "masked" not in page.locator(".here .legend").text_content()


@pytest.mark.parametrize("head", [0, 1], ids=["computed", "pictured"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_weights_are_drawn_and_named(running, bad, head):
    q, k = np.random.default_rng(7).standard_normal((2, 2, 40, 4)).astype(np.float32)
    q[:, 12, 1] = bad
    part = ch.AttentionMatrix(q[None], k[None], causal=True)
    wrong = int(np.argmax(np.isnan(np.asarray(part[0, head, 12]))))
    document = document_of(part, TOKENS + TOKENS[: 40 - len(TOKENS)], room=1)
    with mapped(running, document, place=f"#cell=12.{wrong}&at=0.0.{head}") as page:
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


def test_two_fingers_zoom_the_map(running, written):
    with mapped(running, written, 390, 800, has_touch=True, is_mobile=True) as page:
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


def test_the_readout_shows_the_weight_of_the_sink(running, tmp_path):
    part = matrix(12, sinks=np.array([2.0, -np.inf, 0.0, 1.0]))
    with mapped(running, part.to_html(), place="#at=0.0.0&cell=5.3") as page:
        total = float(part[0, 0, 5].sum())
        said = re.search(r"sum to ([\d.]+); the sink takes ([\d.]+)", page.locator("#readout").text_content())
        assert [float(x) for x in said.groups()] == pytest.approx([total, 1 - total], rel=1e-3)
        page.keyboard.press("]")
        until(page, "document.querySelector('#readout').textContent.includes('sum to 1')")
        assert "sink" not in page.locator("#readout").text_content()


def test_a_cell_chosen_while_a_smaller_layer_opens_lies_in_it(running, small):
    layers = [long.ShownLayer(str(place), range(H), part.part(0)) for place, part in enumerate((small[0], matrix(5)))]
    with mapped(running, long.document([long.ShownRun("", layers, None)])) as page:
        press = "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'KEY', bubbles: true}))"
        page.evaluate("; ".join(press.replace("KEY", key) for key in ("}", "ArrowUp")))
        until(page, "document.querySelector('.where').textContent.includes('of 5')")
        page.wait_for_timeout(200)
        assert state(page)["cell"].startswith("4.")
        assert page.locator("#readout").text_content().startswith("query 4 ")


@pytest.mark.parametrize("pads", [[0, 1], [len(TOKENS) - 2, len(TOKENS) - 1]])
def test_padding_is_dimmed_and_not_where_a_page_opens(running, small, pads: list[int]):
    layers = [long.ShownLayer("0", range(H), small[0].part(0))]
    run = long.ShownRun("", layers, TOKENS, pads=pads)
    with mapped(running, long.document([run])) as page:
        dim = "[...document.querySelectorAll('.token.padding')].map((x) => [x.dataset.token, x.title, style(x)])"
        found = page.evaluate(dim.replace("style(x)", "getComputedStyle(x).opacity"))
        assert found == [[str(pad), "padding", "0.4"] for pad in pads]
        last = len(TOKENS) - 1 - (2 if pads[0] else 0)
        assert state(page)["cell"].startswith(f"{last}.")


def test_a_head_without_exact_weights_shows_its_picture(running, small):
    with mapped(running, document_of(small[0], TOKENS, room=1), place="#at=0.0.1&cell=20.0") as page:
        assert "stored as an image" in page.locator(".here").text_content()
        result = re.search(r": ([\d.e-]+) ± ([\d.e-]+)", page.locator("#readout").text_content())
        assert abs(float(result[1]) - small[0][0, 1, 20, 0]) <= float(result[2]) * 1.1
        page.keyboard.press("[")
        until(page, "document.querySelector('.here').textContent.includes('every weight is computed')")


def test_markup_in_tokens_is_shown_as_text(running):
    part = matrix(len(HOSTILE), causal=True)
    layer = long.ShownLayer(HOSTILE[1], range(H), part.part(0), note=HOSTILE[2])
    run = long.ShownRun(HOSTILE[0], [layer], list(HOSTILE))
    with mapped(running, long.document([run], title=HOSTILE[0])) as page:
        assert page.evaluate("window.bad") is None
        assert page.locator("main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.long
def test_the_tab_stays_responsive_at_a_hundred_thousand_tokens(running, tmp_path):
    n = 100_000
    q, k = (fresh().standard_normal((1, n, 8), dtype=np.float32).astype(bfloat16) for _ in "qk")
    part = ch.AttentionMatrix(q, k, causal=True, window=(3000, 0))
    run = long.ShownRun("long", [long.ShownLayer("0", [0], part.part(0))], [f" w{index}" for index in range(n)])
    place = tmp_path / "page.html"
    place.write_bytes(long_page(long.document([run])))
    assert place.stat().st_size < 8e6
    with opened(running, place, wait=".map-of") as page:
        for key in ("+", "+", "+", "+", "+", "+", "+", "+", "ArrowUp", "ArrowLeft"):
            page.keyboard.press(key)
        until(page, "document.querySelector('.where').textContent.includes('each cell is one weight')", patience=60_000)
        ready(page)
        i, j = map(int, state(page)["cell"].split("."))
        assert value_of(page.locator("#readout").text_content()) == pytest.approx(float(part[0, i, j]), rel=2e-3)
