"""Every key of config.json and of a GGUF file is computed with as Transformers does, or the model is refused."""

import json

import numpy as np
import pytest
from hypothesis import settings

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("gguf")

from clearhead.errors import FileError  # noqa: E402
from clearhead.models.model import load  # noqa: E402
from decoder_peers import CASES, N, peer_of, saved  # noqa: E402
from gguf_files import write  # noqa: E402
from problems import in_the_gate  # noqa: E402
from seeds import fresh  # noqa: E402

CHANGED = {  # other values of keys, each of which some family computes with and others do not
    "rope_theta": [500.0], "partial_rotary_factor": [0.5], "rope_local_base_freq": [77.0], "rotary_dim": [4],
    "rope_scaling": [{"type": "linear", "factor": 3.0}, {"rope_type": "dynamic", "factor": 2.0}],
    "rope_parameters": [{"rope_theta": 33.0}, {"rope_type": "linear", "factor": 2.0}], "factor": [3.0],
    "sliding_window": [3], "sliding_window_pattern": [1, 2], "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": [True, False], "max_window_layers": [0, 2], "tie_word_embeddings": [True, False],
    "attention_bias": [True, False], "mlp_bias": [True, False], "use_bias": [False], "use_qkv_bias": [False],
    "hidden_act": ["relu", "gelu"], "hidden_activation": ["relu", "gelu"], "activation_function": ["relu"],
    "query_pre_attn_scalar": [3], "attn_logit_softcapping": [1.0], "final_logit_softcapping": [1.0],
    "embedding_multiplier": [2.0], "attention_multiplier": [0.7], "logits_scaling": [3.0], "clip_qkv": [0.1],
    "residual_multiplier": [0.5], "scale_attn_weights": [False], "qk_layernorm": [True], "pretraining_tp": [2],
    "use_parallel_residual": [True], "use_bidirectional_attention": [True], "head_dim": [8], "hidden_size": [48],
    "original_max_position_embeddings": [8], "attention_dropout": [0.3], "rms_norm_eps": [0.3], "of tomorrow": [1],
    "norm_topk_prob": [True, False], "num_experts_per_tok": [1], "decoder_sparse_step": [2], "rotary_pct": [0.5],
    "enable_bias": [False], "_remove_final_layer_norm": [True], "parallel_attn": [False], "alibi": [True],
    "layer_norm_eps": [0.3], "layer_norm_epsilon": [0.3], "norm_epsilon": [0.3], "no_rope_layers": [[0, 1, 0]],
    "global_head_dim": [16], "num_global_key_value_heads": [1, 3], "num_kv_shared_layers": [0, 2, 5],
    "attention_k_eq_v": [True, False], "use_double_wide_mlp": [True], "enable_moe_block": [True],
    "hidden_size_per_layer_input": [0, 8], "vocab_size_per_layer_input": [40], "per_layer_config": [{}],
}  # fmt: skip
MORE = {  # of one family
    "bloom": {"num_hidden_layers": [3], "n_head": [3], "seq_length": [9], "n_embed": [48], "slow_but_exact": [True]},
    "mpt": {
        "attn_config": [{"clip_qkv": 0.4}, {"softmax_scale": 0.3}, {"alibi": False}, {"qk_ln": True}],
        "no_bias": [False], "logit_scale": [0.5], "expansion_ratio": [2],
    },
}  # fmt: skip
ALIKE = ("gpt2, ", "llama, ", "qwen2, ", "phi-3, long", "mpt, ")  # of these one case of the family is enough
APART = [name for name in CASES if not name.startswith(ALIKE)]


def logits_of(place, ids):
    with torch.no_grad():
        model = hf.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="eager")
        return model.eval()(torch.tensor([ids])).logits[0].numpy()


def assert_close(ours, theirs, what=""):
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4 * max(1, np.abs(theirs).max()), err_msg=what)


@pytest.mark.parametrize("name", in_the_gate(APART, *(name for name in APART if name not in APART[::3])))
def test_each_key_of_a_folder_counts_or_is_refused(tmp_path, name):
    place, ids = saved(peer_of(name), tmp_path), fresh().integers(0, 97, N).tolist()
    stated = json.loads((place / "config.json").read_text())
    changes = [{key: None} for key in stated]
    for key, values in (CHANGED | MORE.get(name, {})).items():
        for value in values:
            value = [value] * stated.get("num_hidden_layers", 3) if key == "layer_types" else value
            changes.append({key: value})
            if key.startswith("rope_"):
                changes.append({"rope_parameters": None, key: value})
            if "per_layer_config" in stated and key.startswith(("global", "layer", "num_")):  # as on the hub
                changes.append({"per_layer_config": None, "global_head_dim": 16, key: value})
    right, drawn = 0, fresh().permutation(len(changes))[: settings().max_examples * 2 // 3]  # in the long run all
    for change in (changes[number] for number in drawn):
        kept = {key: value for key, value in {**stated, **change}.items() if change.get(key, value) is not None}
        (place / "config.json").write_text(json.dumps(kept))
        try:
            ours = load(place).run(ids).logits
        except FileError:
            continue
        try:
            theirs = logits_of(place, ids)
        except Exception:  # what Transformers refuses as well, or warns of
            continue
        right += 1
        assert_close(ours, theirs, str(change))
    assert right > len(drawn) / 4 or len(drawn) < len(changes)  # of all of them two in five


def test_a_key_that_is_refused_is_named_and_a_tensor_counts_once(tmp_path):
    from safetensors.numpy import load_file, save_file

    place = saved(peer_of("llama 3"), tmp_path)
    weights, stated = load_file(place / "model.safetensors"), json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(stated | {"clip_qkv": 8.0}))
    with pytest.raises(FileError, match=r"clip_qkv is 8\.0, and this decoder does not know"):
        load(place)
    (place / "config.json").write_text(json.dumps(stated))
    save_file({**weights, "transformer.lm_head.weight": weights["lm_head.weight"]}, place / "model.safetensors")
    with pytest.raises(FileError, match=r"`output\.weight` twice"):
        load(place)
    save_file({key: x for key, x in weights.items() if "lm_head" not in key}, place / "model.safetensors")
    with pytest.raises(FileError, match=r"lack `output\.weight`"):
        load(place)
    ids = list(range(N))
    save_file({key.removeprefix("model."): x for key, x in weights.items()}, place / "model.safetensors")
    assert_close(load(place).run(ids).logits, logits_of(place, ids))  # saved without its head
    (place / "config.json").write_text(json.dumps(stated | {"attention_bias": True}))
    with pytest.raises(FileError, match="attention_bias is True, but the weights have none of these biases"):
        load(place)


def with_keys(**values):
    """Adds keys to a GGUF file, __ for a point; None leaves out what is written without it."""

    def more(writer):
        prefix, (kept,) = f"{writer.arch}.", writer.kv_data
        for name, value in values.items():
            key = prefix + name.replace("__", ".")
            kept.pop(key, None)
            if isinstance(value, (bool, int, float, str, list)):
                kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
                getattr(writer, f"add_{kinds[type(value)]}")(key, value)

    return more


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0}}
PATTERN = {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16}
READ = {  # the keys, and the model of Transformers that they mean
    "a factor is linear": ("llama 3", LINEAR, {"rope__scaling__factor": 3.0}),
    "its older name": ("llama 3", LINEAR, {"rope__scale_linear": 3.0}),
    "type none": ("qwen3", {}, {"rope__scaling__type": "none", "rope__scaling__factor": 3.0}),
    "gemma 2 without keys": ("gemma 2", {"sliding_window": 4096, "head_dim": 16, "query_pre_attn_scalar": 16}, {
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention__sliding_window": None,
        "attention__scale": None,
    }),
    "a number as pattern": ("gemma 3", {**PATTERN, "sliding_window_pattern": 2}, {
        "attention__sliding_window_pattern": 2
    }),
    "a list as pattern": ("gemma 3", {**PATTERN, "sliding_window_pattern": 3}, {
        "attention__sliding_window_pattern": [True, True, False, True]
    }),
    "no window at all": ("gemma 3", {**PATTERN, "sliding_window_pattern": 1}, {"attention__sliding_window": None}),
    "Ollama's names": ("gemma 3", {**PATTERN, "rope_local_base_freq": 77.0, "rope_theta": 5e5}, {
        "rope__freq_base": None, "rope__global__freq_base": 5e5, "rope__local__freq_base": 77.0
    }),
    "gemma 4 without a cap": ("gemma 4", {"sliding_window": 5, "final_logit_softcapping": 30.0}, {
        "final_logit_softcapping": None, "attention__scale": 3.0, "rope__freq_base_swa": None
    }),
    "near base": ("gemma 3", {**PATTERN, "rope_local_base_freq": 77.0}, {"rope__freq_base_swa": 77.0}),
}  # fmt: skip
REFUSED = [
    ("gemma 3", {"rope__freq_base": None}), ("granite", {"logit_scale": None}), ("qwen3", {"of__tomorrow": 3}),
    ("granite", {"rope__scaling__finetuned": False}), ("qwen3", {"attention__causal": False}),
    ("qwen3", {"expert_count": 4}),
    ("qwen3", {"rope__scaling__type": "linear", "rope__scaling__attn_factor": 2.0}),
    ("gpt2", {"use_parallel_residual": True}), ("gemma 4", {"expert_count": 4}),
    ("gemma 4", {"attention__key_length_swa": None}), ("gemma 4", {"attention__value_length": 3}),
]  # fmt: skip


@pytest.mark.parametrize("what", READ)
def test_keys_of_gguf_files_mean_what_llama_cpp_means(tmp_path, what, monkeypatch):
    name, options, keys = READ[what]
    kind, usual = CASES[name]
    drop = ("rope_parameters", "attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    plain = {key: value for key, value in usual.items() if key not in drop}
    monkeypatch.setitem(CASES, what, (kind, plain | options))
    peer, ids = peer_of(what), fresh().integers(0, 97, N).tolist()
    model = load(write(tmp_path / "model.gguf", peer, more=with_keys(**keys)))
    with torch.no_grad():
        assert_close(model.run(ids).logits, peer(torch.tensor([ids])).logits[0].numpy())


@pytest.mark.parametrize(("name", "keys"), REFUSED, ids=[f"{name} {list(keys)[-1]}" for name, keys in REFUSED])
def test_keys_of_gguf_files_that_are_not_known_are_refused(tmp_path, name, keys):
    place = write(tmp_path / "model.gguf", peer_of(name), more=with_keys(**keys))
    with pytest.raises(FileError) as caught:
        load(place)
    key = list(keys)[-1].replace("__", ".")
    assert key in str(caught.value) or key in ("expert_count", "attention.value_length")
