"""The table of models in docs/models.md: how each runs, seen on a small random model of its class."""

from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")

import clearhead as ch  # noqa: E402
from clearhead.models.families import ARCHITECTURES  # noqa: E402
from clearhead.models.model import Model  # noqa: E402
from small_models import save, small, tokenizer  # noqa: E402

DOCS = Path(__file__).parent.parent / "docs"
SIZES_OF = {  # sizes that fit together, of latent attention, state spaces and layers of several kinds
    "deepseek_v3": {
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16,
        "num_key_value_heads": 4,
    },
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "nemotron_h": {"layer_types": ["mamba", "full_attention"], "mamba_num_heads": 8, "mamba_head_dim": 8},
}  # fmt: skip
MODELS = {  # as people call them: Transformers' class, and the architecture that llama.cpp's files say
    "Llama 3, 3.1, 3.2 and 3.3": ("LlamaForCausalLM", "llama"),
    "Llama 4": ("Llama4ForConditionalGeneration", "llama4"),
    "Qwen2.5": ("Qwen2ForCausalLM", "qwen2"),
    "Qwen3, dense": ("Qwen3ForCausalLM", "qwen3"),
    "Qwen3 30B-A3B, 235B-A22B": ("Qwen3MoeForCausalLM", "qwen3moe"),
    "Qwen3-Next": ("Qwen3NextForCausalLM", "qwen3next"),
    "Qwen3.5": ("Qwen3_5ForConditionalGeneration", "qwen35"),
    "Gemma 2": ("Gemma2ForCausalLM", "gemma2"),
    "Gemma 3 1B": ("Gemma3ForCausalLM", "gemma3"),
    "Gemma 3 4B, 12B, 27B": ("Gemma3ForConditionalGeneration", "gemma3"),
    "Gemma 4": ("Gemma4ForConditionalGeneration", "gemma4"),
    "Gemma 4, text alone": ("Gemma4ForCausalLM", "gemma4"),
    "gpt-oss": ("GptOssForCausalLM", "gpt-oss"),
    "Mistral 7B, Nemo, Small": ("MistralForCausalLM", "llama"),
    "Ministral 3": ("Mistral3ForConditionalGeneration", "mistral3"),
    "Mixtral": ("MixtralForCausalLM", "llama"),
    "DeepSeek V3 and R1": ("DeepseekV3ForCausalLM", "deepseek2"),
    "R1's distillations": ("Qwen2ForCausalLM", "qwen2"),
    "Phi-3, Phi-4": ("Phi3ForCausalLM", "phi3"),
    "GLM-4": ("Glm4ForCausalLM", "glm4"),
    "GLM-4.5, 4.6, 4.7": ("Glm4MoeForCausalLM", "glm4moe"),
    "SmolLM, SmolLM2": ("LlamaForCausalLM", "llama"),
    "SmolLM3": ("SmolLM3ForCausalLM", "smollm3"),
    "OLMo 2": ("Olmo2ForCausalLM", "olmo2"),
    "OLMo 3": ("Olmo3ForCausalLM", "olmo2"),
    "Granite 4, hybrid": ("GraniteMoeHybridForCausalLM", "granitehybrid"),
    "Command R7B": ("Cohere2ForCausalLM", "cohere2"),
    "EXAONE 4": ("Exaone4ForCausalLM", "exaone4"),
    "Nemotron-H, Nemotron 3": ("NemotronHForCausalLM", "nemotron_h"),
    "Pythia": ("GPTNeoXForCausalLM", "gptneox"),
    "GPT-2": ("GPT2LMHeadModel", "gpt2"),
}


def row_of(place, name):
    """A row of the table; what does not run for any reason is called refused."""
    (kind, architecture), way = MODELS[name], "refused"
    kind, words = getattr(hf, kind), ["the", "cat", "sat", "on", "mat"]
    family = kind.config_class.model_type
    with suppress(Exception):
        model = small(kind, **SIZES_OF.get(family, {}))
        loaded = ch.load_model(save(place, model, words))
        way = "NumPy" if isinstance(loaded, Model) else "Transformers"
        try:
            ch.explain("the cat sat on the", loaded if way == "NumPy" else (model, tokenizer(words)))
        except Exception:
            way = "refused"
    from_gguf = "NumPy" if architecture in ARCHITECTURES else "refused"
    return f"| {name} | `{family}` | {way} | `{architecture}` | {from_gguf} |"


@pytest.mark.filterwarnings("ignore:.*was not seen:UserWarning")
@pytest.mark.gate
@pytest.mark.parametrize("name", MODELS)
def test_each_model_of_the_table_runs_as_it_says(tmp_path, name):
    row = row_of(tmp_path, name)
    assert row in (DOCS / "models.md").read_text(encoding="utf-8"), row
    assert row[row.index(" | `") :].replace("refused", "拒绝") in (DOCS / "zh" / "models.md").read_text(
        encoding="utf-8"
    )
