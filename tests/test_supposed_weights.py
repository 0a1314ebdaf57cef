"""Everything that shows weights, in a real browser, under what is supposed."""

import re

import numpy as np
import pytest

import clearhead as ch
from browser import opened, until
from clearhead.view.long import PageOptions, ShownLayer, ShownRun, document
from clearhead.view.page import encoded
from seeds import fresh

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
    (tmp_path / "page.html").write_bytes(encoded(document([ShownRun("", shown, None)], PageOptions())))
    with opened(running, tmp_path / "page.html", width=width, wait=".map-of") as page:
        for media in ("screen", "print"):
            page.emulate_media(media=media)
            places = page.evaluate(PLACES)
            assert len(places) == layers * heads
            for _, head, left, top, side, whole in places:
                cell = whole / heads
                assert left == pytest.approx(cell * (head + 3 / 70), abs=0.6)
                assert (top, side) == pytest.approx((cell * 3 / 70, cell * 64 / 70), abs=0.6)


def test_tokens_are_shaded_as_they_come_into_view(running):
    n = 400
    q, k = fresh().standard_normal((2, 1, n, 4))
    with opened(
        running,
        ch.AttentionMatrix(q, k).to_html(tokens=[f" word{i}" for i in range(n)]),
        wait=".map-of",
        reduced_motion="reduce",
    ) as page:
        until(page, "document.querySelector('.lines').children.length > 3")
        page.mouse.move(2, 2)
        page.evaluate("window.first = document.querySelector('.lines li')")
        seen = {}
        for power in (-3, 3):
            page.locator("#dive-temperature").evaluate(TEMPERATURE % power)
            page.wait_for_timeout(250)
            seen[power] = []
            for place in (0, 1e6):
                page.locator(".passage").evaluate(f"each => each.scrollTo(0, {place})")
                page.wait_for_timeout(250)
                seen[power].append(page.evaluate(SHADES))
            page.locator(".passage").evaluate("each => each.scrollTo(0, 0)")
            page.wait_for_timeout(250)
        assert page.evaluate("window.first.isConnected")
        (_, cold), (_, warm) = seen[-3], seen[3]
        assert warm[-10:] != cold[-10:]
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        printed = page.evaluate(SHADES)
        weights = np.asarray(ch.AttentionMatrix(q, k, scale=0.5 / 8)[0], np.float64)[-1]
        order = np.argsort(weights)
        low, high = printed[order[0]], printed[order[-1]]
        assert low != high
        assert all(printed[index] == high for index in np.flatnonzero(weights > 0.999 * weights.max()))
        assert warm[-10:] == printed[-10:]
