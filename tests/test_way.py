"""The way to a logit: what each part of the model adds, against PyTorch's own modules, and by its sum."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.cells import cell_len

import clearhead as ch
from clearhead.explaining.attribution import against, ways
from clearhead.explaining.steps import steps_of_text
from clearhead.models import model as gpt2
from clearhead.models.protocol import choices
from dense_gpt2 import random_peer
from seeds import fresh
from terminal import call

TEXT = "humpty dumpty sat on"


def test_parts_are_what_pytorchs_modules_write(tmp_path: Path):
    """Each module's output is caught by a hook; the last layer norm is PyTorch's, differentiated with σ held."""
    rng = fresh()
    epsilon = float(rng.uniform(1e-5, 0.1))
    peer = random_peer(tmp_path, rng, tie_word_embeddings=bool(rng.integers(2)), layer_norm_epsilon=epsilon)
    model = gpt2.load(tmp_path)
    ids = [token.id for token in model.tokenizer.tokens(TEXT)]
    position, token = int(rng.integers(len(ids))), int(rng.integers(2400))
    written: dict[str, torch.Tensor] = {}
    for path, module in peer.named_modules():
        if path.endswith(("wte", "wpe", "c_proj", "ln_f", "ln_1", "ln_2")):
            module.register_forward_hook(
                lambda _, inputs, out, path=path: written.update({path: out[0], f"into {path}": inputs[0][0]})
            )
    with torch.no_grad():
        logit = float(peer(torch.tensor([ids])).logits[0, position, token])
    last = written["into transformer.ln_f"][position].double()
    sigma = (last.var(unbiased=False) + epsilon).sqrt()
    row, norm = peer.lm_head.weight[token].detach().double(), peer.transformer.ln_f

    def adds(vector: torch.Tensor) -> float:
        x = vector.detach().double()
        return float(row @ ((x - x.mean()) / sigma * norm.weight.detach()))

    (to_token,) = ways(model, run := model.run(ids), position, choices(model, run.logits[position], [token]))
    names = ["transformer.wte", "transformer.wpe"]
    for layer in range(3):
        names += [f"transformer.h.{layer}.attn.c_proj", f"transformer.h.{layer}.mlp.c_proj"]
    expected = [adds(written[name][position]) for name in names]
    expected += [float(row @ norm.bias.detach().double()), 0.0]
    size = sum(map(abs, expected))
    np.testing.assert_allclose([part.adds for part in to_token.parts], expected, rtol=0, atol=1e-5 * size)
    assert to_token.logit == pytest.approx(logit, abs=1e-5 * size)
    assert to_token.difference <= 1e-5 * size
    np.testing.assert_allclose(to_token.sums, np.cumsum(expected), rtol=0, atol=1e-5 * size)
    for part in to_token.parts:
        if part.layer is not None:
            inside = f"transformer.h.{part.layer}.{'ln_1' if part.kind == 'attention' else 'ln_2'}"
            x, y = written[f"into {inside}"][position].double(), written[inside][position].double()
            assert part.read is not None
            deviation = (x.var(unbiased=False) + epsilon).sqrt()
            assert part.read[:3] == pytest.approx([float(x.norm()), float(y.norm()), float(deviation)], rel=1e-4)
        if part.kind == "attention":
            assert sum(part.heads) + part.bias == pytest.approx(part.adds, abs=1e-5 * size)
            weight = peer.transformer.h[part.layer].attn.c_proj.weight.detach()
            inputs = written[f"into transformer.h.{part.layer}.attn.c_proj"][position]
            alone = [adds(inputs[start : start + 6] @ weight[start : start + 6]) for start in range(0, 24, 6)]
            np.testing.assert_allclose(part.heads, alone, rtol=0, atol=1e-5 * size)


def test_each_listed_token_has_a_way_and_differences_are_logits():
    position = int(fresh().integers(4))
    seen = steps_of_text(TEXT, count=7, token=position)
    run = seen.model.run([token.id for token in seen.tokens])
    assert {each.position for each in seen.ways} == {position}
    assert [each.token for each in seen.ways] == np.argsort(-run.logits[position])[:7].tolist()
    first, second = fresh().choice(7, 2, replace=False)
    less = against(seen.ways[first], seen.ways[second])
    logits = [float(run.logits[position, seen.after[place].id]) for place in (first, second)]
    assert less.logit == pytest.approx(logits[0] - logits[1], abs=1e-4)
    assert less.sums[-1] == pytest.approx(less.logit, abs=1e-4)
    for part in less.parts:
        if part.heads:
            assert sum(part.heads) + part.bias == pytest.approx(part.adds, abs=1e-4)


def test_why_prints_the_way_and_the_difference_from_the_other():
    why = ch.explain("mary had a little", answer="lamb", against="girl")
    assert [each.text for each in why.ways] == [" lamb", " girl"]
    less = against(*why.ways)
    assert less.sums[-1] == pytest.approx(why.rivals.lead, abs=1e-4)
    done = call("explain", "mary had a little", "--why", "lamb", "--against", "girl", "--way")
    assert "minus ␣girl" in done.stdout
    for part in less.parts:
        if abs(part.adds) > 0.1:
            assert f"{part.adds:+.2f}" in done.stdout
    assert f"{why.rivals.lead:+.2f}" in done.stdout
    assert all(cell_len(line) <= 80 for line in done.stdout.splitlines())


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_terminal_prints_every_part_in_80_columns(language: str):
    printed = call("explain", TEXT, "--way", "--lang", language).stdout
    assert ("layer 1" if language == "en" else "第 1 层") in printed
    assert all(cell_len(line) <= 80 for line in printed.splitlines())
    data: dict[str, Any] = json.loads(call("explain", TEXT, "--json", "-").stdout)["way"]
    for part, total in zip(data["parts"], data["sums"], strict=True):
        if abs(part["adds"]) > 0.1:
            assert f"{part['adds']:+.2f}" in printed
        assert f"{total:.2f}" in printed
        if part["read"] is not None and part["layer"] is not None:
            assert f"σ {part['read']['sigma']:.3g}" in printed
