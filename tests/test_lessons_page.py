"""The page of `clearhead learn` in a real browser."""

import re

import numpy as np
import pytest

from browser import number, opened
from clearhead.explaining.learning import learning
from seeds import fresh


@pytest.fixture(scope="module")
def run():
    return learning()


@pytest.fixture(scope="module")
def pages(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lessons")
    run.save(folder / "learn.html")
    return folder


def shown(page, place):
    return [number(text) for text in page.locator(place).all_text_contents()]


def cells(page, figure):
    """The numbers in the cells of a figure, as they are drawn."""
    return [number(text) for text in page.locator(".figure").nth(figure).locator("text.number").all_text_contents()]


def test_the_slider_shows_the_numbers_of_its_step(running, run, pages):
    place = int(fresh().integers(1, len(run.step) - 1))
    with opened(running, pages / "learn.html", wait="h1") as page:
        page.locator("#lesson").focus()
        page.keyboard.press("Home")
        for _ in range(place):
            page.keyboard.press("ArrowRight")
        assert page.evaluate("[...document.querySelectorAll('.pan')].every((e) => e.scrollWidth <= e.clientWidth)")
        said = page.locator("#lesson").get_attribute("aria-valuetext")
        step, loss = re.fullmatch(r"Step (\d+): loss ([\d.]+)", said).groups()
        assert int(step) == run.step[place]
        assert float(loss) == pytest.approx(run.loss[place], rel=5e-3)
        following, slopes = (shown(page, f"ol.next >> nth={index} >> .figures") for index in (0, 1))
        np.testing.assert_allclose(following, 100 * run.following[place, run.likeliest()], rtol=0.06, atol=0.006)
        np.testing.assert_allclose(slopes, run.gradient[place], rtol=0.06)
        for index, name in enumerate(("w_q", "w_k", "w_v")):
            value = number(page.locator("figure").nth(index).locator(".written b").inner_text())
            assert value == pytest.approx(float(getattr(run, name)[place, -1, 0]), rel=1e-3, abs=1e-6)
        lower = np.tril_indices(5)
        for head in range(2):
            drawn = cells(page, 3 + head)
            np.testing.assert_allclose(drawn[:15], run.scaled[place, head][lower], rtol=0.06, atol=0.06)
            np.testing.assert_allclose(drawn[15:], run.weights[place, head][lower], rtol=0.06, atol=0.006)
        page.locator("#lesson").fill("30")
        page.locator("#theme").click()
        page.locator("#language").click()
        shown_now = page.locator("#lesson").input_value(), page.locator("h1").inner_text()
        assert shown_now == ("30", "查询、键、值的权重矩阵是怎样学出来的")
