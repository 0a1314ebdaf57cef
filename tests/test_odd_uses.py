"""Uses that once gave a silent wrong, a hang or somebody else's error: each is refused by name, or right."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import DtypeError, RuleError, shown
from clearhead.torch import scaled_dot_product_attention
from terminal import call
from watched import build

META = torch.ones(1, 2, 3, 4, device="meta")
ENORMOUS = np.broadcast_to(np.float32(1), (2, 4, 2**40, 8))


def test_an_edit_of_padding_is_refused():
    model = build("gpt2", n_layer=1)
    ids, mask = torch.ones(2, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long)
    mask[:, :2] = 0
    with torch.no_grad(), ch.change(model, ch.cut(keys=2)):
        model(ids, attention_mask=mask)
    with pytest.raises(RuleError, match="never acted"), torch.no_grad(), ch.change(model, ch.cut(queries=4, keys=1)):
        model(ids, attention_mask=mask)


def test_an_edit_may_wait_for_a_query_that_is_generated_later():
    model = build("gpt2", n_layer=1)
    with torch.no_grad(), ch.change(model, ch.cut(queries=slice(7, 8), keys=slice(6, 7))):
        model.generate(torch.ones(1, 6, dtype=torch.long), max_new_tokens=4, do_sample=False)


def test_anything_can_be_shown():
    endless: list[Any] = []
    endless.append(endless)
    lazy = torch.nn.LazyLinear(3).weight
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for value in (lazy, nested, META, endless, itertools.repeat(1), [0] * 10**7, "x" * 10**7, ENORMOUS):
        assert 0 < len(shown(value)) <= 160
    with pytest.raises(DtypeError, match="has no shape yet"):
        ch.attention(lazy, np.eye(3), np.eye(3))


def test_tensors_without_numbers_give_shapes_or_say_why_not():
    for rules in ({"query_offset": 1, "causal": True}, {"sinks": [1.0, 2.0]}, {"kv_lengths": [2]}):
        assert ch.attention(META, META, META, **rules).shape == META.shape
    assert scaled_dot_product_attention(META, META, META, is_causal=True).is_meta
    with torch.no_grad(), pytest.raises(RuleError, match="the meta device"):
        ch.AttentionMatrix(META, META)[0]
    with pytest.raises(RuleError, match="the meta device"):
        ch.AttentionMatrix(META, META).observe(groups=([0] * 3, [0] * 3))


@pytest.mark.parametrize("number", ["NaN", "1e308"])
def test_a_case_whose_numbers_overflow_has_a_page(tmp_path: Path, number: str):
    case = {"k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]], "scores": [[6.5, 10], [2, 3.5]]}
    place = tmp_path / "nan.json"
    place.write_text(json.dumps(case).replace("{", f'{{"q": [[{number}, 1], [1, 2]], ', 1))
    done = call("trace", place, "--html", "-")
    assert done.stderr == ""
    assert done.stdout.startswith("<!doctype html>")
