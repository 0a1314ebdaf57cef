"""What a page shows on its first screen, in a real browser; each head framed by what it did."""

import numpy as np
import pytest

import clearhead as ch
from browser import number, opened, until
from clearhead.explaining.steps import steps_of_text
from clearhead.models import model as gpt2
from clearhead.view import page as written
from clearhead.view.long import ShownLayer, ShownRun, document
from seeds import fresh


def test_each_head_is_framed_by_its_contributions(running):
    rng = fresh()
    n = int(rng.integers(3, 8))
    q, k, v, g = (rng.standard_normal((1, 2, n, width)) for width in (4, 4, 3, 3))
    matrix = ch.AttentionMatrix(q, k, causal=True)
    shown = document([ShownRun("causes", [ShownLayer("0", range(2), matrix, v=v, g=g)], [" w"] * n)])
    effects = np.asarray(matrix.contributions(v, g))[0].sum((1, 2))
    with opened(running, shown, wait=".map-of", color_scheme="light") as page:
        for head, effect in enumerate(effects):
            button = page.locator(f".heads [data-place='0 {head}']")
            said = number(button.get_attribute("title").split("(")[1].split(")")[0])
            assert said == pytest.approx(effect, rel=0.06, abs=0.006)
            frame = button.evaluate(
                "each => getComputedStyle(each).boxShadow.match(/[\\d.]+/g).slice(0, 3).map(Number)"
            )
            assert (frame[2] > frame[0]) == (effect > 0), (frame, effect)
        assert "by the derivatives" in page.locator(".answer > p.note").text_content()


BOXES = """() => Object.fromEntries(
    ['.passage', '.next', '.heads', '.map-of', '#readout', '.heads [aria-pressed=true]'].map((name) => {
        const box = document.querySelector(name)?.getBoundingClientRect();
        return [name, box && [box.left, box.top, box.right, box.bottom]];
    }),
)"""
SETTLED = "document.querySelector('#readout')?.textContent.includes('rank')"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The shipped model's page, and one of 12 × 12 heads."""
    folder, rng = tmp_path_factory.mktemp("screen"), fresh()
    steps_of_text("mary had a little lamb its fleece was white as snow", gpt2.load()).save(folder / "few.html")
    layers = [
        ShownLayer(str(place), range(12), ch.AttentionMatrix(*rng.standard_normal((2, 1, 12, 40, 4)), causal=True))
        for place in range(12)
    ]
    run = ShownRun("many", layers, [f" w{i}" for i in range(40)])
    written.write(folder / "many.html", lambda: document([run]))
    return {name: folder / f"{name}.html" for name in ("few", "many")}


def assert_panel_scrolls(page):
    """The panel of heads scrolls to the chosen one."""
    start = page.evaluate("scrollY")
    page.locator(".heads [aria-pressed=true]").focus()
    for _ in range(12):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#head').textContent.startsWith('Layer 11,')")
    for layer in (11, 10, 9, 8, 7, 6):
        until(page, f"document.querySelector('#head').textContent.startsWith('Layer {layer},')")
        until(page, SETTLED)
        boxes = page.evaluate(BOXES)
        panel, chosen = boxes[".heads"], boxes[".heads [aria-pressed=true]"]
        assert panel[1] <= chosen[1] < chosen[3] <= panel[3]
        assert page.evaluate("scrollY") == start
        page.keyboard.press("{")


def assert_labels(page):
    """The labels below the heads are their captions in short."""
    heads = page.locator(".heads .head")
    for place in range(heads.count()):
        kind, *share = heads.nth(place).locator("small").get_attribute("data-label").split()
        said = heads.nth(place).get_attribute("title")
        assert f": {'previous-token' if kind == 'prev.' else kind}" in said
        assert not share or share[0] in said
    heads.nth(3).hover()
    assert page.locator(".caption").text_content() == heads.nth(3).get_attribute("title")
    page.mouse.move(2, 2)
    chosen = page.locator(".heads [aria-pressed=true]").get_attribute("title")
    assert page.locator(".caption").text_content() == chosen


@pytest.mark.parametrize("name", ["few", "many"])
@pytest.mark.parametrize("width", [pytest.param(1100, marks=pytest.mark.gate), 1280])
def test_text_heads_map_and_readout_share_the_first_screen(running, pages, name, width):
    with opened(running, pages[name], width, 800, wait=".map-of") as page:
        until(page, SETTLED)
        boxes = page.evaluate(BOXES)
        assert (boxes[".next"] is None) == (name == "many")
        for part in (".passage", ".next", ".heads", "#readout"):
            if boxes[part]:
                assert 0 <= boxes[part][0] < boxes[part][2] <= width, part
                assert 0 <= boxes[part][1] < boxes[part][3] <= 800, part
        assert boxes[".map-of"][1] <= 500
        assert boxes["#readout"][0] >= boxes[".map-of"][2]  # beside the map
        assert page.evaluate("document.documentElement.scrollWidth") == width
        if width == 1280:
            (assert_panel_scrolls if name == "many" else assert_labels)(page)


def test_a_long_text_opens_where_the_chosen_token_stands(running):
    x = np.ones((1, 1, 1500, 4), np.float32)
    with opened(
        running,
        ch.AttentionMatrix(x, x, causal=True).to_html(tokens=[f" word{i}" for i in range(1500)]),
        wait=".passage .is-query",
    ) as page:
        inside = """() => {
            const [box, token] = [document.querySelector(".passage"), document.querySelector(".passage .is-query")]
                .map((each) => each.getBoundingClientRect());
            return token.top >= box.top && token.bottom <= box.bottom;
        }"""
        page.wait_for_function(inside)
        assert page.locator(".passage").evaluate("box => box.scrollTop") > 0
