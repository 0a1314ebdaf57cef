"""The picture of the whole model and the tour, in a real browser, beside the library's numbers."""

import re
from urllib.parse import quote

import numpy as np
import pytest

import clearhead as ch
from browser import axe, number, opened, until
from clearhead.digits import percent
from clearhead.explaining.steps import steps_of_text
from seeds import fresh
from test_live import READY
from test_why import random_model, random_text, shipped

STOPS = ("text", "qkv", "scores", "scaled", "masked", "weights", "heads", "output")
TEXTS = ("humpty dumpty sat on", "jack and jill went up the", "mary had a little")
SAID = "document.querySelector('.tour p').textContent"


@pytest.fixture(scope="module")
def explained():
    return ch.explain(TEXTS[0], shipped()).to_html()


def test_the_picture_has_the_models_parts_and_what_they_add(running, explained):
    seen = ch.explain(TEXTS[0], shipped())
    with opened(running, explained, wait=".picture li", reduced_motion="reduce", bypass_csp=True) as page:
        parts = page.locator("[data-part]").all()
        told = {part.get_attribute("data-part"): part.locator(".door").get_attribute("title") for part in parts}
        middle = [f"{kind}-{layer}" for layer in range(2) for kind in ("layer", "mlp")]
        steps = [f"step-{each}" for each in STOPS[1:]]
        assert list(told) == ["text", "embeddings", *middle, "unembedding", "next", *steps]
        ways = seen.way.parts
        for layer in range(2):
            for name, kind in (("layer", "attention"), ("mlp", "mlp")):
                adds = next(part.adds for part in ways if (part.layer, part.kind) == (layer, kind))
                assert number(told[f"{name}-{layer}"].split(", ")[-1].split("layer")[0][:5]) == pytest.approx(
                    adds, abs=0.06
                )
        assert percent(seen.next[0].probability) in told["next"]
        assert page.locator("[data-part^=layer] i").count() == 16
        page.locator("[data-part=layer-1] i").nth(3).click()
        until(page, "location.hash.includes('step-weights')")
        until(page, "document.querySelector('#pick-layer').value + document.querySelector('#pick-head').value === '13'")
        for door in ("mlp-0", "step-scores"):
            page.locator(f"[data-part={door}] button").press("Enter")
            until(page, f"document.activeElement.id === 'step-{'way' if door == 'mlp-0' else 'scores'}-title'")
        page.locator("[data-part=step-scores] button").focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.parentElement.dataset.part") == "step-scaled"
        assert axe(page, "'.overview'") == []


def test_every_layer_is_in_the_picture_of_a_deep_model(running):
    rng = fresh()
    model = random_model(rng, layers=6)
    seen = ch.explain(random_text(rng, 4), model)
    with opened(running, seen.to_html(), 390, wait=".picture li") as page:
        assert page.locator("[data-part^=layer]").count() == model.config.layers
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.locator(".overview .headed button").is_visible()


def test_each_stop_says_the_runs_numbers_and_its_change(running, explained):
    text = str(fresh().choice(TEXTS))
    with opened(
        running, explained, place=f"#try={quote(text)}&temperature=1", wait=".picture li", reduced_motion="reduce"
    ) as page:
        until(page, READY)
        until(page, f"document.querySelectorAll('.passage .token').length === {len(text.split())}")
        page.locator(".overview .headed button").click()
        layer, head = (int(x) for x in re.findall(r"head (\d+) of layer (\d+)", page.evaluate(SAID))[0][::-1])
        trace = steps_of_text(text, shipped(), layer=layer, head=head).trace
        i = len(text.split()) - 1
        j = int(np.asarray(trace.weights)[i].argmax())
        score, weight = (float(np.asarray(x)[i, j]) for x in (trace.scores, trace.weights))
        raw = np.exp(np.asarray(trace.scores)[i] - score)
        expected = {
            2: f"= {score:.2f}"[:5].replace("-", "−"),
            3: percent(float(1 / raw.sum()))[:4],
            5: percent(weight),
            6: percent(weight),
        }
        for stop in range(8):
            until(page, f"location.hash.includes('tour={stop + 1}')")
            assert f"Stop {stop + 1} of 8" in page.locator("#tour").text_content()
            assert expected.get(stop, "") in page.evaluate(SAID)
            if stop:
                until(
                    page, f"Math.abs(document.querySelector('#step-{STOPS[stop]}').getBoundingClientRect().top) < 400"
                )
            if stop == 6:
                page.locator("#tour-try").click()
                until(page, "document.querySelector('.tour p + p').textContent.includes('now 0%')")
                assert f"cuts={layer}.{head}.{i}.{j}" in page.evaluate("location.hash")
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Escape")
        assert page.locator(".tour").is_hidden()
        until(page, "!/tour|cuts/.test(location.hash)")


def test_a_link_opens_its_stop_and_terms_explain_themselves(running, explained):
    with opened(running, explained, 390, place="#tour=3", wait=".tour:not([hidden])", bypass_csp=True) as page:
        until(page, READY)
        assert "Stop 3 of 8" in page.locator("#tour").text_content()
        page.locator(".tour dfn").first.focus()
        assert page.locator("#tip").text_content().startswith("query: the vector by which")
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()
        assert page.locator(".tour").is_visible()
        page.locator("#language").evaluate("button => button.click()")
        assert "第 3 站" in page.locator("#tour").text_content()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert axe(page, "'.tour'") == []


SLOWLY = """const read = Response.prototype.arrayBuffer, waiting = () => new Promise((go) => setTimeout(go, 500));
    Response.prototype.arrayBuffer = function () { return waiting().then(() => read.call(this)) }"""


def test_a_record_has_the_tour_without_changes_of_the_run(running):
    rng = fresh()
    seen = ch.explain(random_text(rng, 4), random_model(rng))
    with opened(running, seen.to_html(), wait=".picture li", reduced_motion="reduce", script=SLOWLY) as page:
        page.locator(".overview .headed button").click()  # before q, k and v are unpacked
        for stop in range(1, 9):
            until(page, f"document.querySelector('#tour').textContent.includes('Stop {stop} of 8')")
            assert page.locator("#tour-try").count() <= (stop in (2, 3))
            page.keyboard.press("ArrowRight")
        assert "--against WORD" in page.locator(".choices").text_content()
