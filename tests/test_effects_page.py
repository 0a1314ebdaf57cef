"""Contributions and cuts on the page, in a real browser, against the matrices of causes; a page's first screen."""

import json
import re

import numpy as np
import pytest

import clearhead as ch
from browser import axe, number, opened, until
from clearhead.explaining.answers import Target
from clearhead.explaining.steps import steps_of_text
from clearhead.models import model as gpt2
from clearhead.models.protocol import Variant
from clearhead.view import page as written
from clearhead.view.long import ShownLayer, ShownRun, document
from seeds import fresh
from test_page import scripts

TEXT = "mary had a little lamb its fleece"
RULES = {"causal": {"causal": True}, "plain": {}, "sink": {"sinks": np.array([0.3, -0.5]), "softcap": 3.0}}


def problem(rng, n, rules, sharp=1.0):
    q, k, v, g = (rng.standard_normal((1, 2, n, width)) for width in (4, 4, 3, 3))
    return ch.AttentionMatrix(sharp * q, k, **rules), v, g


def page_of(matrix, v, g, count=None):
    """Of both heads, with names of so many tokens."""
    names = None if count is None else [f" w{i}" for i in range(count)]
    return document([ShownRun("causes", [ShownLayer("0", range(2), matrix, v=v, g=g)], names)])


def read(page, kind):
    """What the readout says of its cell: query, key, effect; None where it is masked."""
    said = page.locator("#readout").text_content()
    i, j = (int(x) for x in re.match(r"query (\d+).*? → key (\d+)", said).groups())
    value = re.search(rf": (masked|{kind} \S+)", said)[1].split(" ")[-1]
    return i, j, None if value == "masked" else number(value)


def step_to(page, i, j, now):
    page.locator(".map-of").focus()
    for key, count in (("Down", i - now[0]), ("Up", now[0] - i), ("Right", j - now[1]), ("Left", now[1] - j)):
        for _ in range(count):
            page.keyboard.press(f"Arrow{key}")
    until(page, f"/^query {i}( .*)? → key {j}[^0-9]/.test(document.querySelector('#readout').textContent)")
    page.wait_for_timeout(80)


def choose(page, kind, word=None):
    page.locator("#shows").select_option(kind)
    until(page, f"document.querySelector('#readout').textContent.includes('{word or kind[:-1]}')")
    page.wait_for_timeout(100)


@pytest.mark.parametrize("rules", RULES)
def test_every_cell_has_the_number_of_the_matrix_of_causes(running, rules):
    rng = fresh()
    n = int(rng.integers(3, 8))
    matrix, v, g = problem(rng, n, RULES[rules], sharp=float(rng.choice([1, 12])))
    with opened(running, page_of(matrix, v, g, n), wait=".map-of", place="#at=0.0.1&cell=1.0") as page:
        until(page, "document.querySelector('#readout')?.textContent.includes('rank')")
        now = 1, 0
        for kind, word, effects in (
            ("moved", "cut", matrix.cut_effects(v, g, rest="first")),
            ("contributions", "contribution", matrix.contributions(v, g)),
            ("cuts", "cut", matrix.cut_effects(v, g)),
        ):
            choose(page, kind, word)
            expected = np.asarray(effects)[0, 1]
            for _ in range(4):
                i = int(rng.integers(n))
                j = int(rng.integers(i + 1 if "causal" in RULES[rules] else n))
                step_to(page, i, j, now)
                *now, value = read(page, word)
                assert value == pytest.approx(expected[i, j], rel=6e-3, abs=1e-6)
            keys = page.locator(".strongest").first.locator(".place").all_text_contents()
            values = [number(x) for x in page.locator(".strongest").first.locator(".num").all_text_contents()]
            row = expected[now[0]]
            assert [abs(x) for x in values] == sorted(map(abs, values), reverse=True)
            assert values == pytest.approx([row[int(key)] for key in keys], rel=6e-3, abs=1e-6)
            assert len(values) == (np.abs(row) > 1e-44).sum()


def test_text_and_map_are_signed(running):
    rng = fresh()
    matrix, v, g = problem(rng, 6, {})
    place = "#at=0.0.0&cell=5.2"
    with opened(running, page_of(matrix, v, g, 6), wait=".map-of", place=place, color_scheme="light") as page:
        until(page, "document.querySelector('#readout')?.textContent.includes('rank')")
        shaded = "all => all.map((each) => each.style.backgroundColor)"
        for kind, word, speaks_for in (("cuts", "cut", -1), ("contributions", "contribution", 1)):
            choose(page, kind, word)
            row = speaks_for * np.asarray(getattr(matrix, {"cuts": "cut_effects"}.get(kind, kind))(v, g))[0, 0, 5]
            page.mouse.move(2, 2)
            page.wait_for_timeout(200)
            for shade, value in zip(page.locator(".passage .token").evaluate_all(shaded), row, strict=True):
                red, _, blue = (int(x) for x in re.findall(r"\d+", shade))
                if abs(value) > 0.05 * np.abs(row).max():
                    assert (blue > red) == (value > 0), (kind, shade, value)
        page.locator("#shows").select_option("weights")
        until(page, "document.querySelector('#readout').textContent.includes('sum to 1')")


def test_an_effect_of_minus_one_is_no_masked_cell(running):
    matrix = ch.AttentionMatrix(np.zeros((1, 2, 2, 1)), np.zeros((1, 2, 2, 1)), causal=True)
    v, g = -np.ones((1, 2, 2, 1)), np.ones((1, 2, 2, 1))
    with opened(running, page_of(matrix, v, g), wait=".map-of", place="#at=0.0.0&cell=0.0") as page:
        until(page, "document.querySelector('#readout')?.textContent.includes('rank')")
        choose(page, "contributions")
        assert read(page, "contribution") == (0, 0, pytest.approx(-1))


def test_the_pages_of_why_and_of_watched_runs_have_causes(running):
    model = gpt2.load()
    seen = ch.explain(TEXT, model)
    header = json.loads(scripts(seen.to_html())["clearhead"])
    assert all("g" in layer["arrays"] for layer in header["runs"][0]["layers"])
    first = seen.edges[0]
    ids = [token.id for token in model.tokenizer.tokens(TEXT)]
    lead = Target(ids, (seen.rivals.token.id,), seen.rivals.against.id, odds=False)
    back = model.differentiated(ids, [Variant()], lead.rows, lambda rows: lead.value(rows)[1])
    made = next(part for layer, _, part in back if layer == first.layer)
    cuts = ch.AttentionMatrix(made.q, made.k, causal=True).cut_effects(made.v, made.g)
    cut = pytest.approx(cuts[first.head, first.query, first.key], rel=6e-3)
    with opened(running, seen.to_html(), wait=".passage .token[style]", color_scheme="dark", bypass_csp=True) as page:
        for fold in page.locator("details.fold > summary").all():
            fold.click()
        page.locator(".fold section:nth-child(2) button").first.click()
        until(page, "document.querySelector('#readout')?.textContent.includes('rank')")
        now = [int(x) for x in re.findall(r"(?:query|key) (\d+)", page.locator("#readout").text_content())]
        step_to(page, first.query, first.key, now)
        choose(page, "cuts")
        assert page.locator("#head").text_content() == f"Layer {first.layer}, head {first.head}"
        assert read(page, "cut") == (first.query, first.key, cut)
        assert axe(page) == []


def test_nan_is_shown_and_a_link_keeps_what_is_shown(running):
    rng = fresh()
    matrix, v, g = problem(rng, 5, {"causal": True})
    v[0, 0, 3, 1] = np.nan
    place = "#at=0.0.0&cell=4.1&show=cuts"
    with opened(running, page_of(matrix, v, g, 5), wait=".map-of", place=place) as page:
        until(page, "document.querySelector('#readout')?.textContent.includes('cut NaN')")
        step_to(page, 2, 1, (4, 1))
        assert read(page, "cut")[2] == pytest.approx(
            np.asarray(matrix.cut_effects(v, g))[0, 0, 2, 1], rel=6e-3, abs=1e-6
        )
        until(page, "document.querySelector('.legend .nonfinite')")
        assert "show=cuts" in page.evaluate("location.hash")


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
