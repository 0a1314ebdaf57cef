"""Everything that shows weights, in a real browser, under what is supposed."""

import re

import numpy as np
import pytest

import clearhead as ch
from browser import browser, opened, until
from seeds import fresh

TEMPERATURE = """each => { each.value = %s; each.dispatchEvent(new Event('input', { bubbles: true })) }"""
PICTURES = """() => [...document.querySelectorAll('.heads canvas')].map((each) => each.toDataURL())"""
SHADES = """() => [...document.querySelectorAll('.passage .token')].map((each) => each.style.background)"""


@pytest.fixture(scope="module")
def running():
    with browser() as found:
        yield found


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
    with opened(running, tmp_path / "page.html", **options) as (page, unwanted):
        until(page, "[...document.querySelectorAll('.heads canvas')].every((each) => each.width > 1)")
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
        assert unwanted == []


@pytest.mark.slow
def test_an_edited_number_is_of_its_head_and_a_rule_of_all(running, tmp_path):
    rng = fresh()
    q, k, v = rng.standard_normal((3, 2, 6, 4))
    ch.trace(q, k, v).save(tmp_path / "page.html")
    options = {"wait": ".map-of", "place": "#at=0.0.0&cell=5.2", "reduced_motion": "reduce"}
    with opened(running, tmp_path / "page.html", **options) as (page, unwanted):
        until(page, "[...document.querySelectorAll('.heads canvas')].every((each) => each.width > 1)")
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
        assert unwanted == []
