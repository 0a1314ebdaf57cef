"""The page's temperature and top-k over the logits of the next token, in a real browser."""

import numpy as np
import pytest

from browser import opened
from clearhead.explaining.steps import steps_of_text
from seeds import fresh

TEXT = "mary had a little"


def expected(logits, temperature, count):
    """softmax(logits/temperature) over the largest `count`, the largest first, and its entropy."""
    kept = -np.sort(-logits.astype(np.float64))[:count] / temperature
    shares = np.exp(kept - kept[0]) / np.exp(kept - kept[0]).sum()
    return shares, -(shares * np.log(np.maximum(shares, 1e-300))).sum()


def check(page, logits, temperature, count):
    shares, entropy = expected(logits, temperature, count)
    shown = [float(x.rstrip("%")) / 100 for x in page.locator(".sampling li .figures").all_text_contents()]
    first = np.zeros(len(shown))
    first[: min(count, len(shown))] = shares[: len(shown)]
    assert shown == pytest.approx(first, rel=0.06, abs=5.1e-5)
    said = page.locator(".sampling [role=status]").text_content()
    assert float(said.split()[1]) == pytest.approx(entropy, rel=0.006, abs=1e-3)


def test_next_tokens_at_a_random_temperature_and_count(running, tmp_path):
    rng = fresh()
    seen = steps_of_text(TEXT)
    seen.save(tmp_path / "page.html")
    assert seen.logits is not None
    with opened(running, tmp_path / "page.html") as page:
        page.locator(".sampling summary").click()
        names = page.locator(".sampling li bdi").all_text_contents()
        assert names[: len(seen.next)] == [choice.text.replace(" ", "␣").replace("\n", "⏎") for choice in seen.next]
        check(page, seen.logits, 1.0, len(seen.logits))
        for _ in range(3):
            temperature, count = round(float(rng.integers(2, 41)) * 0.05, 2), int(rng.choice([1, 2, 5, 10, 50]))
            page.locator("#temperature").fill(str(temperature))
            page.locator("#top-k").select_option(str(count))
            check(page, seen.logits, temperature, count)
        page.locator("#temperature").focus()
        before = page.locator("#temperature").input_value()
        page.keyboard.press("ArrowLeft")
        assert page.locator("#temperature").input_value() != before or float(before) == 0.1
