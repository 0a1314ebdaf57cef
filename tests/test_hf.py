"""attn_implementation="clearhead": eager attention's outputs, gradients and tokens."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from clearhead.errors import RuleError
from clearhead.hf.attending import attend
from programs import python
from watched import FAMILIES, FAMILY, build, greedy, inputs, logits


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
import clearhead.hf  # registers
model = hf.AutoModel.from_config(config, attn_implementation="clearhead")
assert model.config._attn_implementation == "clearhead"
"""


@pytest.mark.gate
def test_only_the_import_of_hf_registers():
    python(REGISTERED, PYTHONWARNINGS="ignore")


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


def test_dropout_acts_in_training_and_follows_the_seed():
    model = set_to(build("gpt2", **{**no_dropout("gpt2"), "attn_pdrop": 0.3}), "clearhead").train()
    ids, draws = inputs("gpt2")["input_ids"], []
    for seed in (11, 11, 12):
        torch.manual_seed(seed)
        draws.append(model(ids).logits)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_stored_weights_and_unknown_arguments_are_refused():
    model, passed = set_to(build("llama"), "clearhead"), inputs("llama")
    with (
        torch.no_grad(),
        pytest.raises(RuleError, match=r"LlamaAttention: output_attentions=True(.|\n)*with ch\.watch"),
    ):
        model(**passed, output_attentions=True)
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(RuleError, match="Module: the model passes `temperature`"):
        attend(torch.nn.Module(), x, x, x, None, temperature=2.0)


CACHES = [{"cache_implementation": "dynamic"}, {"cache_implementation": "static"}]
CASES = [
    *product(("gpt2", "llama", "mistral", "gemma2", "gemma3", "gpt-oss", "t5", "whisper"), CACHES),
    *product(("gpt2", "llama", "gemma3", "gpt-oss", "t5"), [{"use_cache": False}]),
    *product(("llama", "gemma3", "t5"), [{"num_beams": 3, **cache} for cache in CACHES]),
]


def generated(models: tuple[Any, Any], passed: dict[str, torch.Tensor], **options: Any) -> list[list[list[int]]]:
    passed = {name: x for name, x in passed.items() if name != "decoder_input_ids"}
    return [model.generate(**passed, **{**greedy(8), **options}).tolist() for model in models]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_tokens_with_and_without_caches_and_with_beams(name: str, options: dict[str, Any]):
    ours, theirs = generated(both(name), inputs(name, "" if name == "whisper" else "left"), **options)
    assert ours == theirs


def test_assisted_generation():
    models, passed = both("llama"), inputs("llama")
    one = {"input_ids": passed["input_ids"][:1]}
    draft = set_to(build("llama", num_hidden_layers=1), "clearhead")
    ours, theirs = generated(models, one, assistant_model=draft)
    assert ours == theirs == generated(models, one)[1]
    assert generated(models, one, prompt_lookup_num_tokens=2)[0] == theirs


@pytest.mark.parametrize("hidden", [0, 1])
def test_a_cache_is_continued_under_the_mask_of_its_beginning(hidden: int):
    tokens, results = inputs("gemma3")["input_ids"], []
    for model in both("gemma3"):
        real, cache = torch.ones(2, 11, dtype=torch.bool), hf.DynamicCache(config=model.config)
        hide = lambda *_, real=real: real[0].__setitem__(slice(hidden * (1 + int((~real).sum()))), False)  # noqa: E731
        model.model.layers[0].register_forward_hook(hide)  # so many keys more in each pass
        for stop in (6, 7, 10, 11):
            passed = {"attention_mask": real[:, :stop], "past_key_values": cache}
            with torch.no_grad():
                results.append(model(tokens[:, cache.get_seq_length() : stop], **passed).logits)
    torch.testing.assert_close(results[:4], results[4:], atol=1e-4, rtol=1e-4)
