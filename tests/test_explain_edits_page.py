"""The page of an explanation with edits, in a real browser: both runs, and the switch between them."""

import re

import numpy as np
import pytest

import clearhead as ch
from browser import opened, until
from clearhead.digits import percent
from clearhead.explaining.head_steps import document
from clearhead.explaining.steps import steps_of_text
from clearhead.models import model as gpt2
from clearhead.spelling import spelled

TEXT = "mary had a little"


@pytest.fixture(scope="module")
def seen():
    edits = [ch.cut(queries="little", keys="mary", layers=[0]), ch.off(layers=[0], heads=[3])]
    return steps_of_text(TEXT, gpt2.load(), edits=edits, layer=0, head=3)


def test_the_page_holds_both_runs_and_a_switch_shows_either(running, seen):
    texts = """[...document.querySelectorAll(".map .picks label")].map((label) => {
        const range = document.createRange();
        range.selectNode([...label.childNodes].find((node) => node.nodeType === Node.TEXT_NODE));
        return range.getBoundingClientRect().bottom;
    })"""
    with opened(running, seen.to_html()) as page:
        bottoms = page.evaluate(texts)
        assert len(bottoms) == 4
        assert max(bottoms) - min(bottoms) < 1
        shown = page.locator(".next-of > ol.next li").all_text_contents()
        for text, each in zip(shown, seen.moved.next[:8], strict=True):
            assert text == f"{spelled(each.text)}{percent(each.after)}without the edits {percent(each.before)}"
        switch = page.get_by_role("switch", name="with the edits")
        assert switch.is_checked()
        assert_page(page, seen, seen)
        assert "multiplies this head's output by 0" in page.locator("#step-heads").text_content()
        switch.click()
        assert not page.locator("#pick-edited").is_checked()
        assert page.evaluate("document.activeElement.id") == "pick-edited"
        until(page, f"document.querySelectorAll('.next-of > ol.next li').length === {len(seen.before.next)}")
        assert_page(page, seen.before, seen)
        assert "multiplies" not in page.locator("#step-heads").text_content()
        page.keyboard.press("e")
        assert page.locator("#pick-edited").is_checked()
        page.locator("#pick-edited").focus()
        page.keyboard.press("e")
        page.keyboard.press("Space")
        assert page.locator("#pick-edited").is_checked()
        page.keyboard.press("e")
        assert not page.locator("#pick-edited").is_checked()
        page.locator("#language").click()
        assert page.get_by_role("switch", name="应用改动").count() == 1
        page.emulate_media(media="print")
        for control in (".bar button", ".keys", ".picks", "details.numbers"):
            assert not page.locator(control).first.is_visible(), control
    with opened(running, steps_of_text(TEXT, gpt2.load()).to_html()) as page:
        assert page.locator("#pick-edited").count() == 0
        page.keyboard.press("e")


def assert_page(page, run, seen):
    """The page shows this run's weights, next token, layer output and statistics."""
    page.evaluate("document.querySelector('.map a[data-step=checked]').click()")
    page.locator("#step-checked .checks li").first.wait_for()
    table = page.locator("#step-weights details.numbers")
    table.locator("summary").click()
    table.locator("tbody td").first.wait_for()
    for i, row in enumerate(table.locator("tbody tr").all()):
        for j, text in enumerate(row.locator("td").all_text_contents()):
            hidden = np.isneginf(run.trace.masked[i, j])
            assert text == "masked" if hidden else abs(float(text) - run.trace.weights[i, j]) < 1e-4
    choice = page.locator(".next li", has_text=run.next[0].text.strip()).first.text_content()
    assert choice.count(percent(run.next[0].probability)) == 1
    assert ("without the edits" if run is seen else "with the edits") in choice
    for line in page.locator("#step-checked .checks li").all_text_contents()[1:]:
        number = float(re.sub(r"[^\d.e-]+$", "", line.split()[-1].replace("−", "-")))
        assert number < 1e-4, line


def test_arrays_that_both_runs_share_are_stored_once(seen):
    header, arrays = document(seen).header, document(seen).arrays
    first, second = header["layers"][0]["arrays"], header["edited"]["layers"][0]["arrays"]
    assert first["w_q"] == second["w_q"]
    assert first["output"] != second["output"]
    assert sum(name.endswith("w_o") for name in arrays) == 1
