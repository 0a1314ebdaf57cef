"""The layers against plain formulas, PyTorch's MultiheadAttention and modules of Transformers."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.errors import ClearheadError, DtypeError, RuleError, ShapeError, UnknownNameError
from clearhead.nn import MultiHeadAttention
from clearhead.nn.rotary import turned

F64 = torch.float64
close = torch.testing.assert_close


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def made(d_model: int = 12, num_heads: int = 4, seed: int = 0, **options: Any) -> MultiHeadAttention:
    """A layer in float64 in evaluation mode, with every parameter moved away from its initial value."""
    layer = MultiHeadAttention(d_model, num_heads, dtype=F64, **options).eval()
    with torch.no_grad():
        for place, parameter in enumerate(layer.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + place) * 0.5 + (parameter.ndim == 1))
    return layer


def rotated(x: Tensor, base: float) -> Tensor:
    """Each pair (x_i, x_{i + d/2}) of position p as a complex number, times e^{i·p·rate}."""
    length, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.arange(length)[:, None].double() / base ** (torch.arange(half).double() / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def plain(layer: MultiHeadAttention, x: Tensor, context: Tensor, values: Tensor, **o: Any) -> tuple[Tensor, Tensor]:
    """The layer by plain formulas: its projections, norms, rotations and extra keys, then the textbook's attention."""
    p, d_k, d_v = layer.state_dict(), layer.d_k, layer.d_v
    project = lambda x, name: nn.functional.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))  # noqa: E731
    q, k, v = (
        project(side, name).unflatten(-1, (-1, size)).transpose(1, 2)
        for side, name, size in ((x, "q_proj", d_k), (context, "k_proj", d_k), (values, "v_proj", d_v))
    )
    if o.get("qk_norm"):
        q, k = (
            t / (t.square().mean(-1, keepdim=True) + torch.finfo(F64).eps).sqrt() * p[f"{name}.weight"]
            for t, name in ((q, "q_norm"), (k, "k_norm"))
        )
    if o.get("rotary"):
        q, k = rotated(q, o["rotary"]), rotated(k, o["rotary"])
    far = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    left, right = o.get("window") or (None, None)
    seen = ((far <= 0) | (not o.get("causal"))) & ((far >= -left) if left is not None else True)
    seen &= (far <= right) if right is not None else True
    for extra in (
        o.get("extra_key") and (p["extra_key"], p["extra_value"]),
        o.get("zero_key") and (0 * k[0], 0 * v[0]),
    ):
        if extra:
            k, v = (torch.cat([t, e[:, :1].expand(len(t), -1, -1, -1)], 2) for t, e in zip((k, v), extra, strict=True))
            seen = torch.cat([seen, torch.ones(len(seen), 1, dtype=torch.bool)], 1)
    trace = ch.trace(
        q, k, v, mask=seen, **{name: p.get(name, o.get(name)) for name in ("softcap", "sinks") if o.get(name)}
    )
    output = trace.output.transpose(1, 2).flatten(2)
    return project(output, "out_proj") if layer.out_proj is not None else output, trace.weights


OPTIONS: list[dict[str, Any]] = [
    {}, {"num_kv_heads": 2}, {"num_kv_heads": 1}, {"d_k": 4}, {"d_v": 5}, {"d_k": 6, "d_v": 2}, {"bias": False},
    {"output_projection": False}, {"causal": True}, {"window": (2, 1)}, {"softcap": 0.7}, {"rotary": 100.0, "d_k": 4},
    {"sinks": True}, {"qk_norm": True}, {"extra_key": True}, {"zero_key": True}, {"dropout": 0.5},
    {"causal": True, "extra_key": True, "zero_key": True, "num_kv_heads": 2},
    {"num_kv_heads": 2, "d_k": 4, "d_v": 5, "bias": False, "causal": True, "window": (3, 0), "softcap": 2.0,
     "rotary": 10000.0, "sinks": True, "qk_norm": True},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_equals_the_formula(options: dict[str, Any]):
    layer, x = made(**options), normal(2, 7, 12, seed=9)
    output, weights = plain(layer, x, x, x, **options)
    close(layer(x), output)
    for average in (True, False):
        again, seen = layer(x, need_weights=True, average_weights=average)
        assert torch.equal(again, layer(x))
        close(seen, weights.mean(1) if average else weights)
    close(layer(x[0]), output[0])
    close(layer(x[0], need_weights=True)[1], weights[0].mean(0))
    flipped = MultiHeadAttention(12, 4, dtype=F64, batch_first=False, **options).eval()
    flipped.load_state_dict(layer.state_dict())
    assert torch.equal(flipped(x.transpose(0, 1)), layer(x).transpose(0, 1))


@pytest.mark.parametrize("options", [{}, {"extra_key": True, "zero_key": True}, {"num_kv_heads": 2, "d_v": 5}], ids=str)
def test_cross_attention_equals_the_formula(options: dict[str, Any]):
    layer = made(d_context=6, d_value_context=8, **options)
    x, context, values = normal(2, 3, 12), normal(2, 5, 6, seed=1), normal(2, 5, 8, seed=2)
    output, weights = plain(layer, x, context, values, **options)
    result, seen = layer(x, context, values, need_weights=True, average_weights=False)
    close(result, output)
    close(seen, weights)
    mask = torch.tensor([True, False, True, True, False])
    masked = layer(x, context, values, mask=mask)
    close(masked, layer(x, context, values, bias=torch.where(mask, 0.0, -torch.inf)))
    close(masked, layer(x, context[:, mask], values[:, mask]))
    short = layer(x, context, values, kv_lengths=torch.tensor([3, 5]))
    close(short[0], layer(x[:1], context[:1, :3], values[:1, :3])[0])


def test_a_mask_over_the_keys_does_not_mask_the_extra_key():
    layer, x = made(extra_key=True), normal(2, 3, 12)
    hidden = layer(x, x[:, :1], mask=torch.tensor([False]))
    close(hidden, layer(x, x, mask=torch.zeros(3, 3, dtype=torch.bool)))
    assert hidden.abs().sum() > 0
    rows = torch.tensor([[True], [False], [True]])
    close(layer(x, mask=rows), layer(x, mask=rows.expand(3, 3)))
    close(layer(x, bias=torch.where(rows, 0.0, -torch.inf)), layer(x, mask=rows))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6, "vdim": 8}, {"kdim": 6},
     {"vdim": 8}, {"dropout": 0.4}, {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6, "bias": False}],
    ids=str,
)  # fmt: skip
def test_a_layer_takes_over_the_weights_of_pytorchs_layer(options: dict[str, Any], *, batch_first: bool):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(12, 4, batch_first=batch_first, dtype=F64, **options).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = MultiHeadAttention.from_torch(theirs)
    assert (ours.training, ours.dropout, ours.batch_first) == (False, theirs.dropout, batch_first)
    inputs = (
        normal(2, 3, 12),
        normal(2, 5, options.get("kdim", 12), seed=1),
        normal(2, 5, options.get("vdim", 12), seed=2),
    )
    inputs = inputs if batch_first else tuple(x.transpose(0, 1) for x in inputs)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    banned = torch.tensor([[False, True, False, False, False]]).expand(3, 5)
    for average in (True, False):
        expected = theirs(*inputs, key_padding_mask=padding, attn_mask=banned, average_attn_weights=average)
        mask = ~padding[:, None, None] & ~banned
        result = ours(*inputs, mask=mask, need_weights=True, average_weights=average)
        for actual, yours in zip(result, expected, strict=True):
            close(actual, yours)
    one = [x[0] if batch_first else x[:, 0] for x in inputs]
    close(ours(*one), theirs(*one)[0])


def test_returned_weights_are_float32_without_a_gradient():
    layer, x = MultiHeadAttention(8, 2, dtype=torch.bfloat16), torch.ones(1, 3, 8, dtype=torch.bfloat16)
    output, weights = layer(x, need_weights=True)
    assert (output.dtype, weights.dtype, weights.requires_grad) == (torch.bfloat16, torch.float32, False)
    with torch.autocast("cpu", torch.bfloat16):
        wide = MultiHeadAttention(8, 2, qk_norm=True, rotary=1e4, sinks=True, extra_key=True, zero_key=True)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                output, weights = wide(x.float(), need_weights=True)
                assert (output.dtype, weights.dtype) == (torch.bfloat16, torch.float32)


def test_one_head_is_the_single_head():
    layer, x = MultiHeadAttention(6, 1, d_v=4, causal=True), torch.randn(2, 5, 6)
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    assert torch.equal(layer(x), layer.out_proj(ch.attention(q[:, None], k[:, None], v[:, None], causal=True)[:, 0]))


def test_parameter_names_shapes_and_initial_values_are_as_documented():
    layer = MultiHeadAttention(
        12, 4, num_kv_heads=2, d_k=5, d_v=7, d_context=6, d_value_context=8, sinks=True, qk_norm=True, extra_key=True
    )
    documented = {
        "q_proj.weight": "(num_heads·d_k, d_model)",
        "k_proj.weight": "(num_kv_heads·d_k, d_context)",
        "v_proj.weight": "(num_kv_heads·d_v, d_value_context)",
        "out_proj.weight": "(d_model, num_heads·d_v)",
        "sinks": "(num_heads,)",
        "extra_key": "(num_kv_heads, 1, d_k)",
        "extra_value": "(num_kv_heads, 1, d_v)",
    }
    shapes = [(20, 12), (10, 6), (14, 8), (12, 28), (4,), (2, 1, 5), (2, 1, 7)]
    said = " ".join(str(MultiHeadAttention.__doc__).split())
    assert all(f"{name} {axes}" in said for name, axes in documented.items())
    assert "each with its .bias, q_norm.weight and k_norm.weight (d_k,)" in said
    expected = dict(zip(documented, shapes, strict=True)) | {"q_norm.weight": (5,), "k_norm.weight": (5,)}
    expected |= {name.replace("weight", "bias"): size[:1] for name, size in expected.items() if "_proj" in name}
    state = layer.state_dict()
    assert {name: tuple(x.shape) for name, x in state.items()} == expected
    for name, x in state.items():
        if name.endswith("_proj.weight"):  # uniform within ±√(6 / (in + out))
            assert 0.9 * (6 / sum(x.shape)) ** 0.5 < x.abs().max() <= (6 / sum(x.shape)) ** 0.5
    assert all((x == 0).all() for name, x in state.items() if name.endswith("bias") or name == "sinks")
    assert all((x == 1).all() for name, x in state.items() if "norm" in name)
    many = MultiHeadAttention(1024, 32, extra_key=True)
    for x in (many.extra_key, many.extra_value):
        assert 0.9 < x.std().item() * 32 < 1.1


def test_rotary_positions_equal_those_of_llama_and_norms_those_of_qwen3():
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    for dtype in (torch.float32, torch.bfloat16):
        layer = MultiHeadAttention(
            64, 4, num_kv_heads=2, rotary=1e4, qk_norm=True, causal=True, bias=False, dtype=dtype
        )
        x = torch.randn(2, 300, 64).to(dtype)
        norm = Qwen3RMSNorm(16, eps=torch.finfo(dtype).eps).to(dtype)
        q, k, v = (p(x).view(2, 300, -1, 16) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        q, k, v = norm(q).transpose(1, 2), norm(k).transpose(1, 2), v.transpose(1, 2)
        cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(300)[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if dtype == torch.float32:
            close(layer(x), layer.out_proj(heads.transpose(1, 2).flatten(2)))
        result = turned(q, *layer.turns.of(0, q))
        assert torch.equal(result, apply_rotary_pos_emb(q, k, cos, sin)[0])


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 2, causal=True, sinks=True, qk_norm=True, rotary=1e4, dropout=0.1, extra_key=False)
    x, wanted = torch.randn(4, 6, 8), torch.randn(4, 6, 8) * 0.1
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimizer, losses = torch.optim.Adam(layer.parameters(), lr=0.02), []
    for _ in range(12):
        loss = (layer(x) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert [name for name, p in layer.named_parameters() if torch.equal(p, before[name])] == []


@pytest.mark.gate
def test_copies_and_compiled_layers_give_the_same_output():
    options = {"causal": True, "sinks": True, "qk_norm": True, "rotary": 1e4, "num_kv_heads": 2, "d_k": 4}
    layer, x = made(**options), normal(2, 5, 12)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(copied(x), layer(x))
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    frozen = layer.requires_grad_(requires_grad=False)
    frozen.v_proj.requires_grad_()
    frozen(x).sum().backward()  # only the values require grad
    assert frozen.v_proj.weight.grad is not None


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: MultiHeadAttention(12, 4, num_kv_heads=3), RuleError, "num_heads is 4 and num_kv_heads 3"),
        (lambda: MultiHeadAttention(10, 4), RuleError, "d_model 10 is no multiple of num_heads 4"),
        (lambda: made(rotary=1e4), RuleError, "rotary positions turn pairs of numbers, and d_k is 3"),
        (lambda: MultiHeadAttention(12, 4, dropout=2.0), RuleError, "dropout is 2.0"),
        (lambda: made()(normal(2, 3, 12).float()), DtypeError, "x is torch.float32 but the layer is torch.float64"),
        (lambda: made()(normal(2, 3, 5)), ShapeError, "x has shape"),
        (lambda: made()(normal(2, 3, 12), normal(3, 12)), ShapeError, "context has shape"),
        (lambda: made()(normal(2, 3, 12), masks=1), ClearheadError, "unknown rule `masks`"),
        (lambda: made(extra_key=True)(normal(2, 3, 12), window=(1, 1)), RuleError, "window with an extra key"),
    ],
)
def test_wrong_arguments_are_refused_with_these_texts(call: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=f"^{words}"):
        call()


@pytest.mark.parametrize(
    ("inputs", "instead"),
    [
        ({"attn_mask": torch.ones(3, 3) > 0}, "mask=~attn_mask: True = may attend here, and may not there"),
        ({"key_padding_mask": torch.ones(2, 3, dtype=torch.bool)}, "mask=~key_padding_mask[:, None, None]: True = may"),
        ({"is_causal": True}, "causal=True"),
        ({"average_attn_weights": False}, "average_weights"),
    ],
)
def test_argument_names_of_pytorchs_layer_are_refused_with_the_name_to_use(inputs: dict[str, Any], instead: str):
    with pytest.raises(UnknownNameError, match=f"^{next(iter(inputs))} is nn.MultiheadAttention's") as refused:
        made()(normal(2, 3, 12), **inputs)
    assert refused.value.hint.startswith(instead)


class LowRank(nn.Module):
    """Another kind of projection, such as adapters and quantisers put in place of a Linear."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.in_features = d_in
        self.both = nn.Sequential(nn.Linear(d_in, 2), nn.Linear(2, d_out))

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x.float()).double()


def test_projections_may_be_replaced_by_other_modules():
    layer, x = made(), normal(2, 3, 12)
    layer.q_proj = LowRank(12, 12)  # type: ignore[assignment]
    assert layer(x.float(), x, x).dtype == F64


def test_sizes_may_be_numpy_integers():
    layer = MultiHeadAttention(np.int64(12), np.int32(4), d_k=np.int64(2), rotary=10)
    assert layer(torch.ones(1, 3, 12)).shape == (1, 3, 12)


@pytest.mark.parametrize("part", ["nn", "torch"])
@pytest.mark.parametrize("way", ["import clearhead.{}", "import clearhead; clearhead.{}"])
def test_without_its_package_a_part_says_what_to_install(part: str, way: str):
    hidden = f"import sys; sys.modules['torch'] = None; {way.format(part)}"
    said = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False).stderr
    assert f"clearhead.errors.MissingExtraError: clearhead.{part} needs PyTorch: " in said
    assert said.endswith("\nhint: pip install 'clearhead[torch]'\n")


def test_without_its_package_a_part_does_not_exist():
    hidden = "import sys; sys.modules['torch'] = None; import inspect, clearhead as ch"
    code = f"{hidden}; print(hasattr(ch, 'nn'), len(inspect.getmembers(ch)) > 20)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"
