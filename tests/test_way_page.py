"""The page's way to a logit: what each part adds, beside the run's numbers, in a real browser."""

import re

import pytest

import clearhead as ch
from browser import number, opened
from clearhead.explaining.attribution import against
from clearhead.explaining.head_steps import document
from clearhead.explaining.steps import steps_of_text
from clearhead.models import model as gpt2
from clearhead.view.container import Document
from dense_gpt2 import random_peer
from seeds import fresh

TEXT = "mary had a little"


def check(page, way):
    """The section's numbers are those of the run, and its parts add up to its logit as far as they are printed."""
    page.locator("#step-way .total").wait_for()  # it is drawn when it comes near the view
    shown = [number(x) for x in page.locator("#step-way li:has(> .track) > .figures").all_text_contents()]
    adds, sums = shown[::2], shown[1::2]
    assert adds == pytest.approx([part.adds for part in way.parts], abs=0.0051)
    assert sums == pytest.approx(way.sums, abs=0.0051)
    assert number(page.locator("#step-way .total .figures").inner_text()) == pytest.approx(way.logit, abs=0.0051)
    heads = [button.text_content().split() for button in page.locator("#step-way button").all()]
    expected = [(head, x) for part in way.parts for head, x in enumerate(part.heads)]
    assert [int(name) for name, _ in heads] == [head for head, _ in expected]
    assert [number(x) for _, x in heads] == pytest.approx([x for _, x in expected], abs=0.0051)
    boxes = page.locator("#step-way small.box").all_text_contents()
    norms = [norm for part in way.parts if part.layer is not None for norm in (part.read, part.wrote) if norm]
    assert len(boxes) == len(norms)
    for text, norm in zip(boxes, norms, strict=True):
        before, after, sigma = map(float, re.findall(r"[\d.]+(?:e-?\d+)?", text)[1:4])
        assert (before, after, sigma) == pytest.approx(norm[:3], rel=0.006)
        assert text.endswith("adds 0")


def test_a_next_token_opens_its_way_and_a_head_its_weights_by_keyboard(running):
    seen = steps_of_text(TEXT)
    chosen, other = seen.ways[3], seen.ways[1]
    with opened(running, seen.to_html(), reduced_motion="reduce") as page:
        page.locator(".next-of .next button:not(.more)").nth(3).focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "step-way-title"
        check(page, chosen)
        page.locator("#pick-less").focus()
        while page.locator("#pick-less option:checked").inner_text() != spelling(other):
            page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.id") == "pick-less"
        check(page, against(chosen, other))
        assert spelling(other) in page.locator("#step-way-title").inner_text()
        page.locator("#language").click()  # the choice stays
        assert page.locator("#pick-next option:checked").inner_text() == spelling(chosen)
        assert page.locator("#pick-less option:checked").inner_text() == spelling(other)
        page.locator("#step-way button").nth(8 + 5).focus()
        page.keyboard.press("Enter")
        assert (page.locator("#pick-layer").input_value(), page.locator("#pick-head").input_value()) == ("1", "5")
        assert page.evaluate("document.activeElement.id") == "step-weights-title"


def spelling(way):
    return way.text.replace(" ", "␣", 1) if way.text.startswith(" ") else way.text


def test_the_page_of_causes_has_the_ways_to_both_tokens(running):
    result = ch.explain(TEXT, answer="lamb", against="girl")
    with opened(running, result.to_html(), place="#step-way") as page:
        check(page, result.ways[0])
        page.locator("#pick-less").select_option("␣girl")
        check(page, against(*result.ways))


def test_many_layers_are_folded_and_open_by_keyboard(running, tmp_path):
    random_peer(tmp_path, fresh(), n_layer=6)
    seen = steps_of_text(TEXT, gpt2.load(tmp_path))
    with opened(running, seen.to_html(), place="#step-way") as page:
        layers = page.locator("#step-way details")
        assert layers.count() == 6
        assert not page.locator("#step-way small.box").first.is_visible()
        for number_of, layer in enumerate(layers.all()):
            whole = sum(part.adds for part in seen.way.parts if part.layer == number_of)
            assert number(layer.locator("summary .figures").first.inner_text()) == pytest.approx(whole, abs=0.0051)
        page.locator("#step-way summary").nth(2).focus()
        page.keyboard.press("Enter")
        assert layers.nth(2).locator("small.box").first.is_visible()
        check(page, seen.way)


def test_hostile_next_tokens_are_text(running):
    made = document(steps_of_text(TEXT))
    facts = made.header["facts"]
    hostile = ["</script><img src=x onerror=alert(1)>", "{other}", "\u202eabc\n", "<b>", "$&"]
    for name, choice, entry in zip(hostile, facts["way"]["choices"], facts["next"], strict=True):
        choice["text"] = entry[0] = name
    with opened(running, Document(made.header, made.arrays), place="#step-way") as page:
        page.locator("#step-way .total").wait_for()
        page.locator("#pick-next").select_option(index=1)
        page.locator("#pick-less").select_option(index=1)
        title = page.locator("#step-way-title").inner_text()
        assert "{other}" in title
        assert "</script>" in title
        assert page.locator("#step-way img, #step-way b").count() == 0
