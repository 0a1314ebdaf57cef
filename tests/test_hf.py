"""`import clearhead.hf` and attn_implementation="clearhead": outputs and gradients equal eager attention's."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import clearhead.hf  # noqa: F401  registers
from clearhead.errors import RuleError
from clearhead.hf.attending import attend
from watched import FAMILIES, FAMILY, build, inputs, logits


def set_to(model: Any, implementation: str) -> Any:
    """A copy of the model with this attention."""
    again = copy.deepcopy(model)
    again.set_attn_implementation(implementation)
    assert again.config._attn_implementation == implementation
    return again


def both(name: str, **changes: Any) -> tuple[Any, Any]:
    """The same model with clearhead's and with eager attention."""
    model = build(name, **changes)
    return set_to(model, "clearhead"), set_to(model, "eager")


def same(result: torch.Tensor, expected: torch.Tensor, real: torch.Tensor | None = None, share: float = 2e-5) -> None:
    """Equal within rounding, where `real` (batch, length) is not 0."""
    assert result.shape == expected.shape
    if real is not None and result.shape[:2] == real.shape:
        result, expected = result[real.bool()], expected[real.bool()]
    reach = float(expected.detach().abs().max())
    np.testing.assert_allclose(result.detach().numpy(), expected.detach().numpy(), atol=share * reach + 1e-7)


REGISTERED = """
import sys
import clearhead
assert not {"torch", "transformers"} & set(sys.modules), "import clearhead is light"
import transformers as hf
config = hf.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9, bos_token_id=0, eos_token_id=0)
try:
    hf.AutoModel.from_config(config, attn_implementation="clearhead")
except ValueError as error:
    assert 'attn_implementation="clearhead"' in str(error) and "not supported" in str(error), error
else:
    raise AssertionError("registered without being asked")
import clearhead.hf  # noqa: F401  registers
model = hf.AutoModel.from_config(config, attn_implementation="clearhead")
assert model.config._attn_implementation == "clearhead"
"""


@pytest.mark.gate
def test_only_the_import_of_hf_registers():
    subprocess.run([sys.executable, "-W", "ignore", "-c", REGISTERED], check=True)


def test_a_saved_model_is_loaded_with_it(tmp_path: Path):
    model, passed = build("llama"), inputs("llama", "left")
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="clearhead")
    assert loaded.config._attn_implementation == "clearhead"
    with torch.no_grad():
        same(loaded(**passed).logits, set_to(model, "eager")(**passed).logits, passed["attention_mask"])


QUICK = [("gpt2", "left"), ("llama", "right"), ("gemma3", "left"), ("bert", "right"), ("t5", ""), ("vit", "")]
EVERY = [
    (family.name, padding)
    for family in FAMILIES
    for padding in ("", "left", "right")
    if not padding or family.kind != "image"
]


def quick_or_slow(quick: list[Any], every: list[Any]) -> list[Any]:
    """All of them, those that are not quick in the gate."""
    return [*quick, *(pytest.param(*one, marks=pytest.mark.gate) for one in every if one not in quick)]


@pytest.mark.parametrize(("name", "padding"), quick_or_slow(QUICK, EVERY))
def test_outputs_equal_eager_attentions(name: str, padding: str):
    ours, theirs = both(name)
    passed = inputs(name, padding)
    with torch.no_grad():
        same(logits(ours(**passed)), logits(theirs(**passed)), passed.get("attention_mask"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype):
    ours, passed = set_to(build("llama"), "clearhead"), inputs("llama", "left")
    with torch.no_grad():
        exact = set_to(ours, "sdpa").double()(**passed).logits  # eager attention's softmax is in float32
        result = ours.to(dtype)(**passed).logits
    assert result.dtype == dtype
    same(result.double(), exact, passed["attention_mask"], share=1e-10 if dtype == torch.float64 else 0.1)


def gradients(model: Any, passed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of all parameters of a loss that depends on every real position."""
    out = logits(model(**passed))
    real = passed.get("attention_mask")
    if real is not None and out.shape[:2] == real.shape:
        out = out * real[..., None]
    (out.float() * torch.linspace(-1, 1, out.shape[-1])).pow(2).mean().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def same_gradients(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], share: float = 2e-5) -> None:
    """Equal within rounding, measured by the largest gradient of all, since some are zero but for rounding."""
    assert expected
    for name, x in result.items():
        assert name in expected or not x.any(), name
    reach = max(float(x.abs().max()) for x in expected.values())
    for name, x in expected.items():
        np.testing.assert_allclose(result[name].numpy(), x.numpy(), atol=share * reach, rtol=1e-3, err_msg=name)


TRAINED = ["gpt2", "llama", "gemma2", "gpt-oss", "bert", "t5", "vit", "clip", "whisper"]


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_equal_eager_attentions(name: str):
    ours, theirs = both(name)
    passed = inputs(name, "" if name in ("vit", "whisper") else "left" if name != "bert" else "right")
    same_gradients(gradients(ours, passed), gradients(theirs, passed))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, *, use_reentrant: bool):
    ours, theirs = both(name, **no_dropout(name))
    passed = inputs(name, "right")
    ours.train().activation_checkpointing_enable({"use_reentrant": use_reentrant})
    ours.enable_input_require_grads()
    same_gradients(gradients(ours, passed), gradients(theirs, passed))


def no_dropout(name: str) -> dict[str, float]:
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "resid_pdrop", "embd_pdrop")
    plain = FAMILY[name].config()
    return {one: 0.0 for one in (*names, "attn_pdrop") if hasattr(plain, one)}


def test_training_under_autocast():
    ours, theirs = both("llama")
    passed = inputs("llama", "left")
    with torch.autocast("cpu", torch.bfloat16):
        same_gradients(gradients(ours, passed), gradients(theirs, passed), share=0.1)


def attentions(model: Any, ids: torch.Tensor, draws: int) -> torch.Tensor:
    """What the attention of a GPT-2 of one layer gives for the same input, (draws, length, channels)."""
    kept: list[torch.Tensor] = []
    hook = model.transformer.h[0].attn.register_forward_hook(lambda _module, _inputs, out: kept.append(out[0]))
    with torch.no_grad():
        model(ids.expand(draws, -1))
    hook.remove()
    return kept[0].double()


def test_dropout_has_eagers_mean_and_variance():
    changes = {**no_dropout("gpt2"), "attn_pdrop": 0.3, "n_layer": 1}
    ours, theirs = both("gpt2", **changes)
    tokens = torch.randint(2, 59, (1, 7))
    truth = attentions(theirs.eval(), tokens, 1)[0]
    draws = 600
    result, expected = attentions(ours.train(), tokens, draws), attentions(theirs.train(), tokens, draws)
    spread = result.std(0)
    assert float(((result.mean(0) - truth).abs() - 7 * spread / draws**0.5).max()) < 1e-6
    ratio = float(result.var(0).sum() / expected.var(0).sum())
    assert 0.75 < ratio < 1.33
    again = []
    for _ in range(2):
        torch.manual_seed(11)
        again.append(attentions(ours, tokens, 2))
    assert torch.equal(*again)
    assert not torch.equal(again[0][0], again[0][1])


def test_weights_that_are_never_stored_are_refused():
    model, passed = set_to(build("llama"), "clearhead"), inputs("llama")
    with (
        torch.no_grad(),
        pytest.raises(RuleError, match=r"LlamaAttention: output_attentions=True(.|\n)*with ch\.watch"),
    ):
        model(**passed, output_attentions=True)


def test_an_argument_that_nobody_knows_is_refused():
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(RuleError, match="Module: the model passes `temperature`"):
        attend(torch.nn.Module(), x, x, x, None, temperature=2.0)
