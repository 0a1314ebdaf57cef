"""The page's way to a logit: what each part adds, beside the run's numbers, in a real browser."""

import re

import pytest

import clearhead as ch
from browser import browser, opened

TEXT = "mary had a little"


@pytest.fixture(scope="module")
def running():
    with browser() as found:
        yield found


def number(text):
    return float(text.replace("−", "-"))


def check(page, way):
    """The section's numbers are those of the run, and its parts add up to its logit as far as they are printed."""
    page.locator("#step-way .total").wait_for()  # it is drawn when it comes near the view
    shown = [number(x) for x in page.locator("#step-way li > .figures").all_text_contents()]
    assert shown == pytest.approx([*(part.adds for part in way.parts), way.logit], abs=0.0051)
    assert sum(shown[:-1]) == pytest.approx(shown[-1], abs=0.0051 * len(shown))
    heads = [button.inner_text().split() for button in page.locator("#step-way button").all()]
    expected = [(head, x) for part in way.parts for head, x in enumerate(part.heads)]
    assert [int(name) for name, _ in heads] == [head for head, _ in expected]
    assert [number(x) for _, x in heads] == pytest.approx([x for _, x in expected], abs=0.0051)


def test_each_part_has_the_runs_number_with_and_without_edits(running, tmp_path):
    seen = ch.explain(TEXT, edits=ch.off(layers=[0], heads=[3]))
    seen.save(tmp_path / "page.html")
    assert seen.before is not None
    with opened(running, tmp_path / "page.html", place="#step-way") as (page, unwanted):
        check(page, seen.way)
        assert "␣" + seen.way.text.strip() in page.locator("#step-way-title").inner_text()
        page.locator("#pick-edited").click()
        page.locator("#step-way").scroll_into_view_if_needed()
        check(page, seen.before.way)
        assert unwanted == []


def test_a_head_opens_its_weights_by_keyboard(running, tmp_path):
    seen = ch.explain(TEXT)
    seen.save(tmp_path / "page.html")
    with opened(running, tmp_path / "page.html", place="#step-way", reduced_motion="reduce") as (page, unwanted):
        page.locator("#step-way button").nth(8 + 5).focus()
        page.keyboard.press("Enter")
        assert (page.locator("#pick-layer").input_value(), page.locator("#pick-head").input_value()) == ("1", "5")
        assert page.evaluate("document.activeElement.id") == "step-weights-title"
        assert unwanted == []


def test_nothing_is_cut_off_on_a_phone_and_chinese_is_complete(running, tmp_path):
    ch.explain(TEXT).save(tmp_path / "page.html", "zh")
    with opened(running, tmp_path / "page.html", width=320, place="#step-way") as (page, unwanted):
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
        text = page.locator("#step-way").inner_text()
        left = re.sub(r"␣?\b(mary|had|little|lamb|a|logit|MLP)\b", "", text)
        assert not re.search("[A-Za-z{}]{2,}", left), left
        assert unwanted == []
