"""`ch.watch` and `ch.change` of models of `ch.load_model`, beside the same weights in Transformers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import RuleError, SelectionError
from clearhead.models.model import Model
from small_models import save
from watched import assert_same_runs, build, run_watched

WORDS = ["mary", "had", "a", "little", "lamb", "its", "fleece", "was", "white", "as", "snow"]
TEXT = "mary had a little lamb its fleece was white"
EDITS = [
    ch.cut(queries="was", keys=["had", "little"], layers=[0]), ch.cut(queries=[4, 5], keys=2, rest="first"),
    ch.boost(keys="lamb", by=2, layers=[-1], heads=[1]), ch.off(layers=[0], heads=[0, 3]),
    ch.off(layers=[1], heads=[1], to="mean"),
]  # fmt: skip


def pair(tmp_path: Path, family: str) -> tuple[Any, Any, torch.Tensor]:
    """A decoder in NumPy, the same weights in Transformers, and the ids of the text."""
    inner = build(family)
    model = ch.load_model(save(tmp_path / family, inner, WORDS))
    assert isinstance(model, Model)
    return model, inner, torch.tensor([[token.id for token in model.tokenizer.tokens(TEXT)]])


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_a_decoder_is_seen_as_the_same_model_in_transformers(tmp_path: Path, family: str):
    model, inner, ids = pair(tmp_path, family)
    asked: Any = {"received": True, "entropy": True, "layers": [1]}
    with ch.watch(model, **asked) as seen:
        run = model.run(TEXT)
    out, other = run_watched(inner, {"input_ids": ids}, **asked)
    np.testing.assert_allclose(run.logits, out.logits[0], atol=1e-4)
    assert_same_runs(seen, other, "received", "entropy")
    assert seen.tokens == [[token.text for token in model.tokenizer.tokens(TEXT)]]
    assert [len(seen.layer(name).v[0]) for name in seen.layers] == [len(other.layer(name).v[0]) for name in seen.layers]
    assert [line[:2] for line in seen.summary()] == [line[:2] for line in other.summary()]


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_decoder_is_changed_as_the_same_model_in_transformers(tmp_path: Path, family: str):
    model, inner, ids = pair(tmp_path, family)
    plain = model.run(TEXT).logits[:]
    with ch.change(model, EDITS), ch.watch(model) as seen:
        run = model.run(TEXT)
    with ch.change(inner, EDITS, tokenizer=SimpleNamespace(decode=model.tokenizer.decoded)):  # spaces between words
        out, other = run_watched(inner, {"input_ids": ids})
    np.testing.assert_allclose(run.logits, out.logits[0], atol=1e-4)
    assert_same_runs(seen, other)
    assert np.abs(run.logits[:] - plain).max() > 1e-3
    np.testing.assert_array_equal(model.run(TEXT).logits[:], plain)  # it is as it was


def test_another_run_of_a_decoder_is_put_in(tmp_path: Path):
    model, inner, ids = pair(tmp_path, "llama")
    other = ids.flip(1)
    with ch.watch(model) as clean:
        model.run(other[0].tolist())
    _, known = run_watched(inner, {"input_ids": other})
    with ch.change(model, ch.like(clean, layers=[1], heads=[0, 2])):
        run = model.run(TEXT)
        with pytest.raises(RuleError, match="come from another run"), ch.watch(model):
            model.run(TEXT)
    with ch.change(inner, ch.like(known, layers=[1], heads=[0, 2])), torch.no_grad():
        np.testing.assert_allclose(run.logits, inner(ids).logits[0], atol=1e-4)


def test_a_loaded_model_of_transformers_is_its_inner_model(tmp_path: Path):
    inner = build("bert")
    model = ch.load_model(save(tmp_path / "bert", inner, WORDS))
    ids = torch.tensor([[token.id for token in model.tokenizer.tokens(TEXT)]])
    with torch.no_grad(), ch.watch(model) as seen:
        model.inner(ids)
    assert seen.tokens == [TEXT.split()]
    with torch.no_grad(), ch.watch(model) as cut, ch.change(model, ch.cut(queries="was", keys="had")):
        model.inner(ids)
    assert not cut.matrix(0)[0, :, 7, 1].any()
    assert_same_runs(seen, run_watched(inner, {"input_ids": ids})[1])
    with ch.change(model, ch.off(layers=[0], heads=[1])):
        changed = model.run(TEXT)
    assert np.abs(changed.layers[1].q - model.run(TEXT).layers[1].q).max() > 1e-3


def test_what_a_decoder_cannot_do_in_a_block_is_refused(tmp_path: Path):
    model, _, _ = pair(tmp_path, "llama")
    two = pytest.raises(RuleError, match=r"a block of ch\.watch records one text, not two")
    with two, ch.watch(model):
        model.run(TEXT), model.run(TEXT)
    with pytest.raises(SelectionError, match="no 7 in"), ch.watch(model, layers=[7]):
        pass
    with pytest.raises(RuleError, match=r"without PyTorch.\n\nhint: ch.explain"), ch.watch(model, causes=True):
        pass
    cut = ch.cut(queries=3, keys=0)
    with pytest.raises(RuleError, match=r"text\) alone.\n\nhint: call model.run\(text\) once"), ch.change(model, cut):
        model.generate([2, 3], 4)
    with pytest.raises(RuleError, match=r"never acted: .* did not run inside the block"), ch.change(model, cut):
        pass
    with (
        pytest.raises(RuleError, match="none of its queries sees any of its keys"),
        ch.change(model, ch.cut(queries=0, keys=3)),
    ):
        model.run(TEXT)
    with pytest.raises(SelectionError, match="there is no head 4 in"), ch.change(model, ch.off(heads=[4])):
        model.run(TEXT)
    assert model.generate([2, 3], 2) == model.generate([2, 3], 2)
