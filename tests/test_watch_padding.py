"""Padded batches: which text a page shows, and texts that begin with padding whose positions nobody gives."""

from typing import Any

import pytest
import torch

import clearhead as ch
from watched import build, inputs


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("positions", [False, True])
def test_padding_on_the_left_without_positions_warns(recwarn: Any, padding: str, positions: bool):  # noqa: FBT001
    model, passed = build("gpt2"), inputs("gpt2", padding)
    if positions:
        passed["position_ids"] = (passed["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), ch.watch(model):
        model(**passed)
    said = [str(warning.message) for warning in recwarn]
    warns = padding == "left" and not positions
    assert len(said) == warns
    if warns:
        assert "1 of 2 texts begin with padding, and GPT2LMHeadModel is given no position_ids" in said[0]


def test_a_page_of_a_batch_says_which_text(tmp_path: Any):
    model = build("gpt2")
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs("gpt2", "right"))
    seen.save(tmp_path / "second.html", batch=1)
    assert "GPT2LMHeadModel, batch=1" in (tmp_path / "second.html").read_text(encoding="utf-8")
