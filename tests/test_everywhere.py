"""Every kind of page at every width, in both themes and languages, magnified and printed: nothing is cut off."""

import re

import numpy as np
import pytest

import clearhead as ch
from browser import axe, draw_all, opened, until
from clearhead.view.long import ShownLayer, ShownRun, document
from long_pages import TOKENS, H, long_page, two_layers
from problems import of_tiers
from seeds import fresh
from terminal import call

PAGES = {  # what writes them, and what must be on paper
    "explain": (["explain", "humpty dumpty sat on a wall"], (".map-of", ".lines .written", "#step-way")),
    "why": (["explain", "mary had a little", "--why"], (".carried", ".map-of", "#step-way")),
    "generated": (["explain", "humpty dumpty", "--generate", "4", "--token", "3"], (".map-of", ".token.generated")),
    "trace": (["trace", "examples/wrong.json"], ("#step-scores .figure",)),
    "learn": (["learn"], ("canvas, svg",)),
}
KEPT = """
MLP PyTorch QKV True WK WO WQ WV causal clearhead concat cos exp float heads layers lens ln log logit model native off
rhymes save scores sink softmax sum text top values vj watch weights zero TEXT ch explain html page why FILE PAGE file
ably all and at bird blackbird cat curl day dishy dumpty eating endoftext fall girl great had hen humpty it lamb little
looked mary mat nut on out outside pig put rained sat side still the then to tuffet un unbelievably wall
an called ches found lived sit
"""  # Latin words of Chinese pages: names, and tokens
HAN = "[一-鿿]"
UNFOLD = "document.querySelectorAll('details').forEach((each) => each.open = true)"
WIDTHS = (320, 390, 768, 1280, 2560)  # 320 is 1,280 at 400 %


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages by name and language."""
    folder = tmp_path_factory.mktemp("pages")
    layers = [ShownLayer(str(index), range(H), part.part(0)) for index, part in enumerate(two_layers())]
    layer = ch.trace_layer(*np.random.default_rng(2).standard_normal((5, 4, 4)), num_heads=2)
    for language in ("en", "zh"):
        for name, (command, _) in PAGES.items():
            assert not call(*command, "--html", folder / f"{name}.{language}.html", "--lang", language).stderr, name
        map_page = long_page(document([ShownRun("run", layers, TOKENS)], "text", language))
        (folder / f"map.{language}.html").write_bytes(map_page)
        layer.save(folder / f"layer.{language}.html", language)
    return folder


LOOKED_AT = of_tiers(["explain", "why"], [name for name in PAGES if name not in ("explain", "why")], every=5)


def sticking_out(page):
    """What is wider than the window, unless it scrolls by itself."""
    return page.evaluate(
        """() => {
        const wide = document.documentElement.clientWidth;
        const scrolls = (e) => e && (getComputedStyle(e).overflowX !== "visible" || scrolls(e.parentElement));
        return [...document.body.querySelectorAll("*")]
          .filter((e) => e.getBoundingClientRect().right > wide + 1 && e.checkVisibility() && !scrolls(e.parentElement))
          .map((e) => e.outerHTML.slice(0, 120));
    }"""
    )


@pytest.mark.parametrize("name", LOOKED_AT)
def test_nothing_is_cut_off_at_any_width_and_axe_finds_no_problem(running, pages, name):
    """At the least width and two others, each in one theme and language; the others in other runs."""
    looked = int(fresh().choice([390, 1280]))
    other = int(fresh().choice([width for width in WIDTHS[1:] if width != looked]))
    for width in (WIDTHS[0], other, looked):
        scheme, language = (str(fresh().choice(each)) for each in (["dark", "light"], ["en", "zh"]))
        options = {"color_scheme": scheme, "bypass_csp": True, "reduced_motion": "reduce"}
        with opened(running, pages / f"{name}.en.html", width, 800, wait="h1", **options) as page:
            if language == "zh":
                page.get_by_role("button", name="中文").click()
            until(page, f"document.documentElement.lang === '{'zh-Hans' if language == 'zh' else 'en'}'")
            page.evaluate(UNFOLD)
            page.wait_for_timeout(200)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (width, sticking_out(page))
            if width == looked:
                draw_all(page)
                page.wait_for_timeout(300)
                assert axe(page) == []


@pytest.mark.parametrize("name", [*LOOKED_AT, "map", pytest.param("layer", marks=pytest.mark.long)])
def test_each_language_is_complete(running, pages, name):
    with opened(running, pages / f"{name}.zh.html", wait="h1") as page:
        page.evaluate(UNFOLD)
        draw_all(page)
        text = page.locator("main").inner_text()
        assert re.search(HAN, text)
        assert {*re.findall("[A-Za-z{}]{2,}", text)} - {*KEPT.split()} == set()
        page.locator("#language").click()
        until(page, "document.documentElement.lang === 'en'")
        draw_all(page)
        assert not re.search(HAN, page.locator("main").inner_text().replace("猫", ""))


MISSING = "document.querySelectorAll('[data-missing]:not([data-missing=\"0\"])').length"


@pytest.mark.parametrize("name", LOOKED_AT)
def test_a_printed_page_holds_what_the_screen_shows(running, pages, name):
    """On paper all parts are there and drawn; at its width (A4: 794 pixels) nothing is cut or sticks to each sheet."""
    parts = [*PAGES[name][1]]
    shown = f"{parts}.filter((one) => [...document.querySelectorAll(one)].some((each) => each.checkVisibility()))"
    cut = "[...document.querySelectorAll('.pan')].filter((each) => each.scrollWidth > each.clientWidth + 8).length"
    script = f"addEventListener('afterprint', () => (window.paper = [{MISSING}, {shown}]))"
    with opened(running, pages / f"{name}.en.html", 1280, 900, wait="h1", color_scheme="dark", script=script) as page:
        page.wait_for_timeout(500)
        until(page, f"{MISSING} === 0")
        assert len(page.pdf(format="A4")) > 10_000
        assert page.evaluate("paper") == [0, parts]
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print", color_scheme="light")
        page.set_viewport_size({"width": 794, "height": 1123})
        assert page.evaluate(cut) == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 794, sticking_out(page)
        sticky = "[...document.querySelectorAll('*')].filter((e) => /sticky|fixed/.test(getComputedStyle(e).position))"
        assert page.evaluate(f"{sticky}.filter((e) => e.checkVisibility()).map((e) => e.outerHTML)") == []
