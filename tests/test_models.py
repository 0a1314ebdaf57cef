"""Decoders in NumPy against Transformers' eager attention: logits, derivatives, decoding; folders and GGUF files."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("gguf")

import clearhead as ch  # noqa: E402
from clearhead.arguments import columns  # noqa: E402
from clearhead.cli import main  # noqa: E402
from clearhead.errors import ClearheadError, FileError  # noqa: E402
from clearhead.explaining.attribution import ways  # noqa: E402
from clearhead.explaining.part_runs import edges  # noqa: E402
from clearhead.models.decoder import Decoder  # noqa: E402
from clearhead.models.families import FAMILIES, Config, Family  # noqa: E402
from clearhead.models.finding import models_here  # noqa: E402
from clearhead.models.model import load  # noqa: E402
from clearhead.models.protocol import Variant, choices  # noqa: E402
from clearhead.models.variants import attended, hidden_of, through_attention  # noqa: E402
from clearhead.models.weights import Weights  # noqa: E402
from gguf_files import write  # noqa: E402
from programs import peak_of  # noqa: E402
from seeds import fresh  # noqa: E402

SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.1, 1.2, 1.3, 1.4],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
QWEN = {
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "head_dim": 16,
}
OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 7,
    "rope_parameters": YARN | {"truncate": False},
}
GEMMA4 = {
    "num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
CASES = {
    "gpt2": ("GPT2", {}),
    "gpt2, exact gelu, own output": ("GPT2", {
        "activation_function": "gelu", "tie_word_embeddings": False, "n_inner": 77
    }),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral, window": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2, late windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma 2": ("Gemma2", {
        "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }),
    "gemma 3": ("Gemma3", {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 9}),
    "gemma 4": ("Gemma4", GEMMA4 | {
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
    }),
    "gemma 4, keys as values": ("Gemma4", GEMMA4 | {
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "attention_bias": True,
    }),
    "phi-3, window": ("Phi3", {"sliding_window": 6}),
    "phi-3, long": ("Phi3", {"original_max_position_embeddings": 32, "rope_parameters": LONG}),
    "granite": ("Granite", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0, "attention_multiplier": 0.2
    }),
    "olmo 2": ("Olmo2", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "starcoder 2": ("Starcoder2", {"sliding_window": 6}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 7}),
    "qwen3-moe": ("Qwen3Moe", QWEN),
    "olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", OSS),
    "gpt-oss, other limit": ("GptOss", OSS | {"swiglu_limit": 2.0}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "olmo 3": ("Olmo3", {
        "num_hidden_layers": 5, "sliding_window": 7,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    }),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-neox, one after the other": ("GPTNeoX", {"use_parallel_residual": False}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
    "phi-2": ("Phi", {}),
    "falcon 7b": ("Falcon", {"multi_query": True, "bias": True}),
    "falcon 40b": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "glm-4": ("Glm4", {"head_dim": 8}),
    "cohere 2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 7}),
    "exaone 4": ("Exaone4", {"num_hidden_layers": 5, "sliding_window": 7}),
    "exaone 4, no windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 8, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0
    }}),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "ministral": ("Ministral", {"head_dim": 16, "sliding_window": 7}),
    "ministral 3": ("Ministral3", {"head_dim": 16, "rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3
    }}),
    "glm": ("Glm", {"head_dim": 8}),
    "cohere": ("Cohere", {}),
    "ernie 4.5": ("Ernie4_5", {"head_dim": 16}),
    "arcee": ("Arcee", {"head_dim": 16}),
    "bloom": ("Bloom", {}),
    "mpt": ("Mpt", {"attn_config": {"clip_qkv": 1.1}}),
    "mpt, other slopes": ("Mpt", {"attn_config": {"alibi_bias_max": 12}}),
    "qwen3, yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN}),
}  # fmt: skip
# Those that GGUF has no key or architecture for.
UNKNOWN = ("opt", "ministral", "glm", "gpt-oss, other limit")
NO_KEY = [(name, "gguf") for name in CASES if name.startswith(("gpt2, ", "qwen2, ")) or name in UNKNOWN]
N = 40


def peer_of(name):
    """Transformers' model of a case, with weights large enough that attention is far from uniform."""
    kind, options = CASES[name]
    inputs = SIZES | options
    if kind == "GPT2":
        keys = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        keys |= {"max_position_embeddings": "n_positions"}
        inputs = {keys.get(key, key): value for key, value in inputs.items()}
        del inputs["intermediate_size"]
    if kind in ("Bloom", "Mpt"):
        inputs["seq_length" if kind == "Bloom" else "max_seq_len"] = inputs.pop("max_position_embeddings")
        del inputs["intermediate_size"]
    if kind in ("GPT2", "GPTNeoX", "OPT", "Bloom", "Mpt"):
        del inputs["num_key_value_heads"]
    config = getattr(hf, f"{kind}TextConfig" if kind in ("Gemma3", "Gemma4") else f"{kind}Config")(
        **inputs, attn_implementation="eager"
    )
    peer = getattr(hf, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config).eval()
    if kind == "Mpt":  # whose class leaves out the number
        largest = {"alibi_bias_max": config.attn_config.alibi_bias_max}
        peer.transformer.build_mpt_alibi_tensor = partial(peer.transformer.build_mpt_alibi_tensor, **largest)
    generator = torch.Generator().manual_seed(int(fresh().integers(2**31)))
    scales = [each for each in peer.named_buffers() if each[0].endswith("layer_scalar")]  # of Gemma 4
    for part, parameter in (*peer.named_parameters(), *scales):  # gpt-oss's experts reach their limit of 7
        torch.nn.init.normal_(
            parameter, std=3.0 if kind == "GptOss" and "gate_up" in part else 0.3, generator=generator
        )
    return peer


def saved(peer, place, shard="5GB"):
    peer.save_pretrained(place, max_shard_size=shard)
    shipped = Path(ch.__file__).parent / "models" / "rhymes" / "tokenizer.json"
    (place / "tokenizer.json").write_bytes(shipped.read_bytes())
    return place


def run_of(peer, ids):
    """Logits, the derivative by what W^O is given in each layer, and by the residual stream, of three logits' sum."""
    inputs = []

    def keep(_, args):
        args[0].retain_grad()
        inputs.append(args[0])

    last = ("o_proj", "c_proj", "out_proj", "dense")
    outs = [
        inner
        for name, inner in peer.named_modules()
        if name.rpartition(".")[2] in last and "att" in name and "mlp" not in name
    ]
    hooks = [out.register_forward_pre_hook(keep) for out in outs]
    done = peer(torch.tensor([ids]), output_hidden_states=True)
    for hidden in done.hidden_states[:-1]:
        hidden.retain_grad()
    (done.logits[0, -1, 5] - 2 * done.logits[0, -1, 9] + done.logits[0, len(ids) // 2, 3]).backward()
    for hook in hooks:
        hook.remove()
    streams = [hidden.grad[0].numpy() for hidden in done.hidden_states[:-1]]
    return done.logits[0].detach().numpy(), [x.grad[0].numpy() for x in inputs], streams


def forms():
    """Of each case a folder or a GGUF file by default, by turns, and the other in the gate."""
    for place, name in enumerate(CASES):
        both = [form for form in ("folder", "gguf") if (name, form) not in NO_KEY]
        for form in both:
            yield pytest.param(name, form, marks=pytest.mark.gate if form != both[place % len(both)] else ())


@pytest.mark.parametrize(("name", "form"), [*forms(), ("llama, biases", "fused"), ("qwen3", "fused")])
def test_logits_derivatives_and_decoding_are_transformers(tmp_path, name, form):
    peer, ids = peer_of(name), fresh().integers(0, 97, N).tolist()
    file = tmp_path / "model.gguf"
    model = load(saved(peer, tmp_path, "50KB") if form == "folder" else write(file, peer, fused=form == "fused"))
    logits, heads, streams = run_of(peer, ids)
    run = model.run(ids)
    np.testing.assert_allclose(np.asarray(run.logits), logits, atol=1e-4 * max(1, np.abs(logits).max()))

    def slope(rows):
        made = np.zeros_like(rows)
        made[-1, [5, 9]], made[0, 3] = (1, -2), 1
        return made

    back = list(model.differentiated(ids, [Variant(), Variant()], range(N // 2, N), slope))
    back = [back[2 * layer + layer % 2][2] for layer in reversed(range(len(back) // 2))]  # either of the two variants
    for ours, theirs in zip((layer.g for layer in back), heads, strict=True):
        joined = ours.swapaxes(0, 1).reshape(N, -1)
        np.testing.assert_allclose(joined, theirs, atol=1e-4 * np.abs(theirs).max())
    for ours, theirs in zip((layer.residual for layer in back), streams, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
    (way,) = ways(model, run, N - 1, choices(model, run.logits[N - 1], [5]))
    assert way.difference <= 1e-4 * sum(abs(part.adds) for part in way.parts)
    gates = np.where(np.arange(N) % 3 == 1, -np.inf, 0.0)  # rows of keys that no later row sees are left out
    (left,) = model.again(run, [Variant(gates, 1)], range(N - 1, N))
    gated = np.asarray(
        model.decoder.logits(hidden_of(model.decoder, ids, [Variant(gates)], range(N - 1, N), {})[-1][0])
    )
    np.testing.assert_allclose(left, gated, atol=1e-4 * max(1, np.abs(gated).max()))
    size = model.config.sizes[-1]  # the last layer, whose keys and values may be another's
    off = Variant(None, 1, {(model.config.layers - 1, 0): np.zeros((N - 1, size.d_k), np.float32)})
    same, other = model.again(run, [off, Variant(None, 5, {}, {5: 7})], range(N - 1, N))
    np.testing.assert_allclose(same[0], run.logits[N - 1], atol=1e-4 * max(1, np.abs(logits).max()))
    expected = model.run([*ids[:5], 7, *ids[6:]]).logits[N - 1]
    np.testing.assert_allclose(other[0], expected, atol=1e-4 * max(1, np.abs(expected).max()))
    made = model.generate(ids, 12)
    whole = np.asarray(model.run(ids + made).logits)[N - 1 : -1]
    gaps = np.sort(whole, axis=-1)[:, -1] - whole[np.arange(12), made]  # cached decoding takes the full pass's choice
    assert gaps.max() <= 1e-4 * max(1, np.abs(whole).max())


def test_a_gated_key_weighs_alpha_times_as_much_beside_alibi():
    """In the formula: ln α is added to a key's logit for every query but its own, and slope·distance is subtracted."""
    rng, places = fresh(), torch.arange(9)
    q, k, v, g = (torch.tensor(rng.standard_normal((4, 9, 8)), requires_grad=True) for _ in range(4))
    logs, slopes = torch.tensor(np.log(rng.random(9)), requires_grad=True), torch.tensor(rng.random(4))
    distance = places[:, None] - places
    logits = q @ k.mT * 8**-0.5 - slopes[:, None, None] * distance + logs * (distance > 0)
    output = logits.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v
    (output * g).sum().backward()
    arrays, rules = [x.detach().numpy() for x in (q, k, v)], {"causal": True, "alibi_slopes": slopes.numpy()}
    part = attended(*arrays, rules, logs.detach().numpy())
    by, by_gates = through_attention(part, g.detach().numpy())
    ours = part.output, by["q"], by["k"], by["v"], by_gates.sum(0)
    for made, right in zip(ours, (output.detach(), q.grad, k.grad, v.grad, logs.grad), strict=True):
        np.testing.assert_allclose(made, right, atol=1e-12)
    weights = edges(part._replace(g=g.detach().numpy()), range(9)).sum(0)  # every edge on a key, but its own query's
    np.testing.assert_allclose(weights.sum(0), logs.grad, atol=1e-12)


def choices_off(config):
    """The config with one of its choices taken back at a time."""
    yield "centred", config._replace(centred=not config.centred)
    yield "activation", config._replace(activation="tanh")
    yield "scale", config._replace(scale=config.scale * 1.1)
    numbers = ("d_input", "clip", "softcap", "logit_softcap", "embedding_scale", "added_scale", "logit_scale", "limit")
    for name in (*numbers, "parallel", "normed_last"):
        if getattr(config, name) != (usual := Config._field_defaults[name]):
            yield name, config._replace(**{name: usual})
    if config.slopes:
        yield "slopes", config._replace(slopes=tuple(reversed(config.slopes)))
    if any(config.windows):
        yield "windows", config._replace(windows=(None,) * config.layers)
    if config.experts:
        yield "chosen", config._replace(chosen=config.chosen - 1)
        yield "shares_sum", config._replace(shares_sum=not config.shares_sum)
    for name, usual in (("rates", 0), ("long", None), ("magnitude", 1), ("warming", 0)):
        if any(rope and np.any(getattr(rope, name) != usual) for rope in config.ropes):
            changed = (rope and rope._replace(**{name: getattr(rope, name) * 0.8}) for rope in config.ropes)
            if name != "rates" or config.ropes[0].long is None:
                yield name, config._replace(ropes=tuple(changed))
    if None in config.ropes and any(config.ropes):
        yield "unturned", config._replace(ropes=(next(filter(None, config.ropes)),) * config.layers)


@pytest.mark.parametrize("name", CASES)
def test_every_choice_of_a_family_changes_its_answers(tmp_path, monkeypatch, name):
    """So that the comparison with Transformers would see each of them missing."""
    peer, ids = peer_of(name), fresh().integers(0, 97, N).tolist()
    folder = saved(peer, tmp_path)
    model = load(folder)
    logits = np.asarray(model.run(ids).logits)

    def changes(other):
        return np.abs(np.asarray(other.run(ids).logits) - logits).max() > 1e-3 * np.abs(logits).max()

    for choice, config in choices_off(model.config):
        assert changes(replace(model, decoder=Decoder(config, model.decoder.weights))), choice
    stored = model.decoder.weights.stored
    optional = ("bias", "sinks.weight", "layer_output_scale.weight")
    parts = {key.lstrip("blk.0123456789") for key in stored if key.endswith(optional)}
    for part in parts - ({"attn_k.bias"} if not any(model.config.ropes) else set()):  # adds the same to all of a row
        left = {key: tensor for key, tensor in stored.items() if not key.endswith(part)}
        assert changes(replace(model, decoder=Decoder(model.config, Weights(left)))), part
    kind = model.config.family
    for switch in ("neighbours", "by_head", "less_one", "transposed", "learned", "vectors", "far_unturned", "ones"):
        usual = Family._field_defaults[switch]
        there = getattr(FAMILIES[kind], switch)
        if (
            there in (usual, ["gguf"])
            or (name, switch) == ("falcon 7b", "by_head")
            or (switch == "far_unturned" and not any(model.config.windows))
        ):
            continue
        with monkeypatch.context() as patched, suppress(FileError):
            patched.setitem(FAMILIES, kind, FAMILIES[kind]._replace(**{switch: usual}))
            assert changes(load(folder)), switch


def test_an_explanation_says_which_experts_a_token_took(tmp_path, capsys, monkeypatch):
    peer = peer_of("qwen3-moe")
    place = write(tmp_path / "model.gguf", peer)
    seen = ch.explain("t0 t0", load(place)).steps(token=1)
    ids = [token.id for token in seen.tokens]
    routers = peer(torch.tensor([ids]), output_router_logits=True).router_logits
    expected = [torch.softmax(router[1], -1).topk(3) for router in routers]
    took = [part.experts for part in seen.way.parts if part.kind == "mlp"]
    assert [[expert for expert, _ in each] for each in took] == [top.indices.tolist() for top in expected]
    shares = [(top.values / top.values.sum()).tolist() for top in expected]
    np.testing.assert_allclose([[share for _, share in each] for each in took], shares, atol=1e-5)
    names, product = [], Weights.product
    with monkeypatch.context() as patch:
        patch.setattr(
            Weights, "product", lambda self, x, name, **how: names.append(name) or product(self, x, name, **how)
        )
        load(place).run(ids[:1])
    assert len([name for name in names if name.startswith("blk.0.ffn_up.")]) == 3  # no other expert is multiplied by
    for language, said in (("en", "by experts "), ("zh", "由专家 ")):
        assert main(["explain", "t0 t0", "--steps", "--token", "1", "--model", str(place), "--lang", language]) == 0
        assert f"{said}{took[0][0][0]} (" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_packed_weights_run_as_their_unpacked_numbers(tmp_path, kind):
    from gguf.quants import dequantize

    sizes = CASES["llama, biases"][1] | {"hidden_size": 64, "num_attention_heads": 4}
    CASES["wide"] = "Llama", sizes
    try:
        peer = peer_of("wide")
    finally:
        del CASES["wide"]
    place = write(tmp_path / "model.gguf", peer, kind)
    model, ids = load(place), fresh().integers(0, 97, N).tolist()
    import gguf

    for tensor in gguf.GGUFReader(place).tensors:  # to the bit
        ours = model.decoder.weights.stored[tensor.name]
        plain = ours.rows() if ours.order is None else ours.rows()[np.argsort(ours.order)]
        np.testing.assert_array_equal(plain, dequantize(tensor.data, tensor.tensor_type).reshape(ours.shape))
    expected = np.asarray(model.run(ids).logits)
    weights = Weights(model.decoder.weights.stored, np.float64)  # NumPy's products
    model = replace(model, decoder=replace(model.decoder, weights=weights))
    np.testing.assert_allclose(np.asarray(model.run(ids).logits), expected, atol=1e-5 * np.abs(expected).max())


def test_gpt_oss_in_four_bits_runs_as_transformers_unpacks_it(tmp_path, monkeypatch):
    from gguf.quants import dequantize
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    monkeypatch.setitem(CASES, "four bits", ("GptOss", OSS | {"hidden_size": 64}))
    peer, rng, packed = peer_of("four bits"), fresh(), {}
    for name, parameter in peer.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inside, outside = parameter.shape
            blocks = torch.from_numpy(rng.integers(0, 256, (experts, outside, inside // 32, 16), np.uint8))
            scales = torch.from_numpy(rng.integers(122, 127, blocks.shape[:-1]).astype(np.uint8))
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            packed |= {name: None, f"{name}_blocks": blocks, f"{name}_scales": scales}
    place, ids = saved(peer, tmp_path), rng.integers(0, 97, N).tolist()
    tensors = load_file(place / "model.safetensors") | packed
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, place / "model.safetensors")
    model, logits = load(place), peer(torch.tensor([ids])).logits[0].detach().numpy()
    np.testing.assert_allclose(np.asarray(model.run(ids).logits), logits, atol=1e-4 * max(1, np.abs(logits).max()))
    import gguf

    file = write(tmp_path / "model.gguf", peer, "MXFP4")
    (tensor,) = (one for one in gguf.GGUFReader(file).tensors if one.name == "blk.1.ffn_up_exps.weight")
    ours = load(file).decoder.weights["blk.1.ffn_up.3.weight"]
    np.testing.assert_array_equal(ours, dequantize(tensor.data, tensor.tensor_type)[3])


def test_what_the_family_does_not_have_is_refused(tmp_path):
    """A tensor that is left out would change every answer."""
    peer = peer_of("qwen3")
    place = saved(peer, tmp_path)
    from safetensors.numpy import load_file, save_file

    weights = load_file(place / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.sinks": np.zeros(6, np.float32)}, place / "model.safetensors")
    with pytest.raises(FileError, match=r"has no `model\.layers\.0\.self_attn\.sinks`"):
        load(place)
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, place / "model.safetensors")
    with pytest.raises(FileError, match=r"lack `blk\.1\.ffn_up\.weight`"):
        load(place)


@pytest.mark.parametrize(
    "damages", [200, pytest.param(600, marks=pytest.mark.gate), pytest.param(4000, marks=pytest.mark.long)]
)
def test_damaged_gguf_files_get_one_error(tmp_path, damages):
    """Damages of a header, each read without a crash, a hang or another error than our own."""
    data = bytearray(write(tmp_path / "model.gguf", peer_of("llama 3")).read_bytes())
    rng, place = fresh(), tmp_path / "damaged.gguf"
    header, kept = data.index(b"token_embd.weight"), 0
    place.write_bytes(data.replace(b"blk.0.attn_q.weight", b"blk_0_attn_q_weight"))
    with pytest.raises(ClearheadError, match="attn_q"):
        load(place)
    for trial in range(damages):
        copy = bytearray(data if trial % 4 else data[: int(rng.integers(0, len(data)))])
        for _ in range(int(rng.integers(1, 4))):
            if len(copy) > 8:
                start = int(rng.integers(0, min(len(copy) - 8, header + 4000)))
                size = int(rng.integers(1, 9))
                copy[start : start + size] = rng.choice([rng.bytes(size), b"\xff" * size, b"\0" * size])
        place.write_bytes(copy)
        with suppress(ClearheadError):
            load(place)
            kept += 1
    assert kept < damages


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(peer_of("qwen2").config.to_dict()), encoding="utf-8")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model.safetensors"}}')
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(FileError, match=f"{name} is no ordinary file"):
        load(tmp_path)


def test_a_run_keeps_no_weights_and_no_logits_of_every_token(tmp_path):
    config = hf.LlamaConfig(**{**SIZES, "vocab_size": 5000, "max_position_embeddings": 8000})
    made = ch.load_model(write(tmp_path / "wide.gguf", hf.LlamaForCausalLM(config)))
    ids = np.random.default_rng(0).integers(0, 5000, 8000).tolist()
    short, long = (peak_of(lambda count=count: made.run(ids[:count]).logits[-1]) for count in (2000, 8000))
    assert long < 4.2 * short, f"{short} bytes, then {long}"
    assert long < 8000 * 5000 * 4


def test_models_are_found_where_ollama_and_lm_studio_keep_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    file = write(tmp_path / "model.gguf", peer_of("llama 3"))
    ollama = tmp_path / ".ollama" / "models"
    manifest = ollama / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "1b"
    manifest.parent.mkdir(parents=True)
    kind = "application/vnd.ollama.image.model"
    manifest.write_text('{"layers": [{"mediaType": "%s", "digest": "sha256:abc"}]}' % kind)  # noqa: UP031
    (ollama / "blobs").mkdir()
    (ollama / "blobs" / "sha256-abc").write_bytes(file.read_bytes())
    studio = tmp_path / ".lmstudio" / "models" / "someone" / "tiny"
    studio.mkdir(parents=True)
    (studio / "tiny.gguf").write_bytes(file.read_bytes()[:1000])
    assert ch.load_model("ollama:tiny:1b").config.layers == 3
    with pytest.raises(FileError, match=r"Ollama has no model other here[\s\S]*ollama:tiny:1b"):
        ch.load_model("ollama:other")
    with pytest.raises(FileError, match="not a whole GGUF file"):
        ch.load_model("lmstudio:tiny")
    listed = {each["name"]: each for each in models_here()}
    assert listed["ollama:tiny:1b"]["family"] == "llama"
    assert not listed["ollama:tiny:1b"]["reason"]
    assert "GGUF" in listed["lmstudio:someone/tiny"]["reason"]
    assert listed["(the shipped model)"]["family"] == "gpt2"
    assert main(["models", "--lang", "zh"]) == 0
    shown = dict(line.split("  ", 1) for line in capsys.readouterr().out.partition("\n\n")[0].splitlines())
    assert shown["（自带的模型）"].strip() == "gpt2，399 万个参数，F16，8.0 MB"
    assert listed["lmstudio:someone/tiny"]["reason"] in shown["lmstudio:someone/tiny"]
    assert len({columns(name + facts) - columns(facts.lstrip()) for name, facts in shown.items()}) == 1
