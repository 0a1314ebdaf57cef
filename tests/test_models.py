"""Decoders in NumPy against Transformers' eager attention: logits, derivatives, decoding; folders and GGUF files."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
pytest.importorskip("gguf")

import clearhead as ch  # noqa: E402
from clearhead.cli import main  # noqa: E402
from clearhead.errors import FileError  # noqa: E402
from clearhead.explaining.attribution import ways  # noqa: E402
from clearhead.explaining.part_runs import edges  # noqa: E402
from clearhead.models.decoder import Decoder  # noqa: E402
from clearhead.models.families import FAMILIES, Config, Family  # noqa: E402
from clearhead.models.model import load  # noqa: E402
from clearhead.models.protocol import Variant, choices  # noqa: E402
from clearhead.models.variants import attended, hidden_of, through_attention  # noqa: E402
from clearhead.models.weights import Weights  # noqa: E402
from decoder_peers import CASES, OSS, SIZES, N, peer_of, saved  # noqa: E402
from gguf_files import write  # noqa: E402
from programs import peak_of  # noqa: E402
from seeds import fresh  # noqa: E402

# Those that GGUF has no key or architecture for.
UNKNOWN = ("opt", "ministral", "glm", "gpt-oss, other limit")
NO_KEY = [(name, "gguf") for name in CASES if name.startswith(("gpt2, ", "qwen2, ")) or name in UNKNOWN]


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
    names, linear = [], Weights.linear
    with monkeypatch.context() as patch:
        patch.setattr(Weights, "linear", lambda self, x, name: names.append(name) or linear(self, x, name))
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


def test_a_run_keeps_no_weights_and_no_logits_of_every_token(tmp_path):
    config = hf.LlamaConfig(**{**SIZES, "vocab_size": 5000, "max_position_embeddings": 8000})
    made = ch.load_model(write(tmp_path / "wide.gguf", hf.LlamaForCausalLM(config)))
    ids = np.random.default_rng(0).integers(0, 5000, 8000).tolist()
    short, long = (peak_of(lambda count=count: made.run(ids[:count]).logits[-1]) for count in (2000, 8000))
    assert long < 4.2 * short, f"{short} bytes, then {long}"
    assert long < 8000 * 5000 * 4
