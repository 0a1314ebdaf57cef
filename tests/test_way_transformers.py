"""The way to a logit in Transformers' decoders: its parts against the models' own logits, and refusals."""

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from rich.cells import cell_len
from rich.console import Console

from clearhead.explaining.attribution import way
from clearhead.explaining.recorded import of_transformers, recorded
from clearhead.explaining.steps import steps_of_text
from clearhead.explaining.stream import NoWay, Stream
from clearhead.models import hub
from clearhead.models.hub import HubConfig, HubModel
from clearhead.report import attribution
from problems import of_tiers
from seeds import fresh
from small_models import save, small
from terminal import call
from watched import FAMILIES, build

QUICK = ["Llama", "Gemma2", "GPTNeoX", "Phi"]
SLOW = [
    "GPT2LMHead", "Mistral", "Qwen3", "Gemma", "Gemma3", "GptOss", "Phi3", "Cohere", "OPT", "Olmo", "Olmo2", "StableLm",
    "Starcoder2", "Mixtral", "Glm4", "Granite", "Qwen3Moe", "SmolLM3", "Llama4",
]  # fmt: skip


def followed(inner: Any, ids: list[int], position: int) -> tuple[Stream | NoWay, np.ndarray]:
    """The stream at a position, and the model's logits there in its own attention."""
    config = inner.config.get_text_config()
    sizes = HubConfig(
        "", config.num_hidden_layers, config.num_attention_heads, 0, config.hidden_size, config.vocab_size
    )
    with recorded(inner, config.num_hidden_layers, position) as kept:
        run = HubModel("", sizes, inner, None).run(ids)
    with torch.no_grad():
        return of_transformers(kept, run), inner(torch.tensor([ids])).logits[0, position].double().numpy()


def problem() -> tuple[list[int], int, int]:
    """A text, a position in it, and a token."""
    rng = fresh()
    return rng.integers(3, 50, 9).tolist(), int(rng.integers(9)), int(rng.integers(60))


@pytest.mark.parametrize("name", of_tiers(QUICK, SLOW))
def test_the_parts_add_up_to_the_models_own_logit(name: str):
    inner = small(getattr(hf, f"{name}Model" if name.endswith("Head") else f"{name}ForCausalLM"))
    ids, position, token = problem()
    stream, logits = followed(inner, ids, position)
    assert isinstance(stream, Stream), stream
    result = way(stream, token, "")
    size = sum(abs(part.adds) for part in result.parts)
    total = result.sums[-1]
    expected = total if result.cap is None else result.cap * np.tanh(total / result.cap)
    assert expected == pytest.approx(logits[token], abs=2e-5 * size)
    assert (result.cap is not None) == (name == "Gemma2")
    attention = [part for part in result.parts if part.kind == "attention"]
    assert len(attention) == 2
    for part in attention:
        assert len(part.heads) == part.sizes[0] == 4
        assert sum(part.heads) + part.bias == pytest.approx(part.adds, abs=2e-5 * size)
    for norm in (norm for part in result.parts for norm in (part.read, part.wrote) if norm):
        assert norm.sigma > 0


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_each_part_is_what_its_module_writes(name: str):
    """The modules are named by hand, and the last norm is the model's own, differentiated with σ held."""
    inner = small(getattr(hf, f"{name}ForCausalLM"))
    ids, position, token = problem()
    ends = ("self_attn", "mlp") if name == "Llama" else ("post_attention_layernorm", "post_feedforward_layernorm")
    caught: dict[str, torch.Tensor] = {}

    def keep(key: str) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:
            caught[key] = (out[0] if isinstance(out, tuple) else out)[0, position].double()

        return hook

    hooks = [
        getattr(block, end).register_forward_hook(keep(f"{number}.{end}"))
        for number, block in enumerate(inner.model.layers)
        for end in ends
    ]
    hooks.append(inner.model.norm.register_forward_pre_hook(lambda _, inputs: keep("last")(None, None, inputs)))
    with torch.no_grad():
        inner(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    last = caught.pop("last")
    norm = inner.model.norm
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = norm.weight.detach().double() + (name == "Gemma2")
    along = inner.lm_head.weight[token].detach().double() * weight / (last.square().mean() + epsilon).sqrt()
    written = [caught[f"{number}.{end}"] for number in range(2) for end in ends]
    expected = [float(along @ vector) for vector in (last - sum(written), *written)]
    stream, _ = followed(inner, ids, position)
    assert isinstance(stream, Stream)
    parts = way(stream, token, "").parts
    size = sum(abs(part.adds) for part in parts)
    np.testing.assert_allclose([part.adds for part in parts[:5]], expected, rtol=0, atol=2e-5 * size)


def test_a_model_that_adds_otherwise_gets_a_reason():
    ids, position, _ = problem()
    scaled = small(hf.GraniteForCausalLM)
    assert isinstance(followed(scaled, ids, position)[0], Stream)
    for layer in scaled.model.layers:
        layer.residual_multiplier = 0.5
    result, _ = followed(scaled, ids, position)
    assert isinstance(result, NoWay)
    assert "layer 0 does more than add" in result.said("en")
    after = small(hf.BertLMHeadModel)  # it normalises the sum itself
    result, _ = followed(after, ids, position)
    assert isinstance(result, NoWay)


def saved(place: Path, model: Any) -> str:
    return save(place, model, ["humpty", "dumpty", "sat", "on", "a", "wall"])


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> str:
    family = next(family for family in FAMILIES if family.name == "llama")
    return saved(tmp_path_factory.mktemp("deep"), build(family, num_hidden_layers=5))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_terminal_folds_many_layers_into_a_line_each(deep: str, language: str):
    seen = steps_of_text("humpty dumpty sat", deep)
    assert seen.way is not None
    printed = call("explain", "humpty dumpty sat", "--way", "--model", deep, "--lang", language).stdout.splitlines()
    assert all(cell_len(line) <= 80 for line in printed)
    for layer in range(5):
        whole = sum(part.adds for part in seen.way.parts if part.layer == layer)
        (line,) = [line for line in printed if f"┃← {'layer' if language == 'en' else '第'} {layer}" in line]
        assert abs(whole) < 0.1 or f"{whole:+.2f}" in line


def test_a_model_without_a_way_says_why_in_one_line(tmp_path: Path):
    granite = small(hf.GraniteForCausalLM)
    granite.config.residual_multiplier = 0.5
    place = saved(tmp_path, granite)
    seen = steps_of_text("humpty dumpty sat", hub.load(place))
    assert seen.way is None
    assert seen.no_way is not None
    assert seen.to_json()["no_way"] == seen.no_way.said("en")
    console = Console(file=StringIO(), width=80)
    attribution.show(console, seen, "zh")
    assert seen.no_way.said("zh") in console.file.getvalue().splitlines()
    seen.save(tmp_path / "page.html")
    assert seen.no_way.said("en")[1:] in (tmp_path / "page.html").read_text(encoding="utf-8")
