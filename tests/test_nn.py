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
from clearhead.errors import DtypeError, RuleError, ShapeError, UnknownNameError
from clearhead.nn import MultiHeadAttention
from clearhead.nn.cache import turned
from programs import python

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
    """The layer by plain formulas: its projections and rotations, then the textbook's attention."""
    p = layer.state_dict()
    project = lambda x, name: nn.functional.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))  # noqa: E731
    q, k, v = (
        project(side, f"{name}_proj").unflatten(-1, (heads, -1)).transpose(1, 2)
        for side, name, heads in zip(
            (x, context, values), "qkv", (layer.num_heads, *2 * [layer.num_kv_heads]), strict=True
        )
    )
    if o.get("rotary"):
        q, k = rotated(q, o["rotary"]), rotated(k, o["rotary"])
    far = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    left, right = o.get("window") or (None, None)
    seen = ((far <= 0) | (not o.get("causal"))) & ((far >= -left) if left is not None else True)
    seen &= (far <= right) if right is not None else True
    trace = ch.trace(q, k, v, mask=seen, softcap=o.get("softcap"), sinks=o.get("sinks"))
    return project(trace.output.transpose(1, 2).flatten(2), "out_proj"), trace.weights


OPTIONS: list[dict[str, Any]] = [
    {}, {"num_kv_heads": 2}, {"num_kv_heads": 1}, {"d_k": 4}, {"bias": False}, {"causal": True}, {"window": (2, 1)},
    {"softcap": 0.7}, {"rotary": 100.0, "d_k": 4}, {"sinks": torch.arange(4.0)}, {"dropout": 0.5},
    {"num_kv_heads": 2, "d_k": 4, "bias": False, "causal": True, "window": (3, 0), "softcap": 2.0, "rotary": 10000.0},
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


@pytest.mark.parametrize("heads", [4, 2])
def test_cross_attention_with_other_projections(heads: int):
    """Of another context, values of another width than keys, and no W^O."""
    layer = made(num_kv_heads=heads)
    layer.k_proj, layer.v_proj = nn.Linear(6, 3 * heads, dtype=F64), nn.Linear(8, 5 * heads, dtype=F64)
    layer.out_proj = nn.Linear(20, 12, dtype=F64)
    x, context, values = normal(2, 3, 12), normal(2, 5, 6, seed=1), normal(2, 5, 8, seed=2)
    output, weights = plain(layer, x, context, values)
    result, seen = layer(x, context, values, need_weights=True, average_weights=False)
    close(result, output)
    close(seen, weights)
    mask = torch.tensor([True, False, True, True, False])
    masked = layer(x, context, values, mask=mask)
    close(masked, layer(x, context, values, bias=torch.where(mask, 0.0, -torch.inf)))
    close(masked, layer(x, context[:, mask], values[:, mask]))
    short = layer(x, context, values, kv_lengths=torch.tensor([3, 5]))
    close(short[0], layer(x[:1], context[:1, :3], values[:1, :3])[0])
    layer.out_proj = nn.Identity()
    assert layer(x, context, values).shape == (2, 3, 20)


def test_rules_of_a_call_replace_those_of_the_layer():
    layer, x = made(causal=True, softcap=0.7), normal(2, 5, 12)
    close(layer(x, causal=False, softcap=None), made()(x))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 6, "vdim": 8}, {"kdim": 6}, {"vdim": 8, "bias": False}, {"dropout": 0.4}],
    ids=str,
)
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
        wide = MultiHeadAttention(8, 2, rotary=1e4, sinks=torch.zeros(2))
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                output, weights = wide(x.float(), need_weights=True)
                assert (output.dtype, weights.dtype) == (torch.bfloat16, torch.float32)


def test_one_head_is_the_single_head():
    layer, x = MultiHeadAttention(6, 1, causal=True), torch.randn(2, 5, 6)
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    assert torch.equal(layer(x), layer.out_proj(ch.attention(q[:, None], k[:, None], v[:, None], causal=True)[:, 0]))


def test_rotary_positions_equal_those_of_llama():
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    for dtype in (torch.float32, torch.bfloat16):
        layer = MultiHeadAttention(64, 4, num_kv_heads=2, rotary=1e4, causal=True, bias=False, dtype=dtype)
        x = torch.randn(2, 300, 64).to(dtype)
        q, k, v = (p(x).view(2, 300, -1, 16).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        result = turned(q, *layer.turns.of(0, q))
        cos, sin = LlamaRotaryEmbedding(config)(x, torch.arange(300)[None])
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if dtype == torch.float32:
            close(layer(x), layer.out_proj(heads.transpose(1, 2).flatten(2)))
        assert torch.equal(result, q)


def test_training_lowers_the_loss():
    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 2, causal=True, rotary=1e4, dropout=0.1)
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
    options = {"causal": True, "rotary": 1e4, "num_kv_heads": 2, "d_k": 4}
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
        (
            lambda: MultiHeadAttention(12, 4, num_kv_heads=3),
            RuleError,
            "num_heads is 4: expected a multiple of num_kv_heads, 3",
        ),
        (lambda: MultiHeadAttention(10, 4), RuleError, "d_model is 10: expected a multiple of num_heads, 4"),
        (lambda: made(rotary=1e4), RuleError, "rotary is 10000.0 and d_k 3: expected a base from 1 up"),
        (lambda: MultiHeadAttention(12, 4, casual=True), UnknownNameError, "unknown rule `casual`"),
        (lambda: MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=True)), RuleError, "theirs"),
        (lambda: MultiHeadAttention(12, 4, dropout=2.0), RuleError, "dropout is 2.0"),
        (lambda: made()(normal(2, 3, 12).float()), DtypeError, "x is torch.float32 but the layer is torch.float64"),
        (lambda: made()(normal(2, 3, 5)), ShapeError, "x has shape"),
        (lambda: made()(normal(2, 3, 12), normal(3, 12)), ShapeError, "context has shape"),
    ],
)
def test_wrong_arguments_are_refused_with_these_texts(call: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=f"^{words}"):
        call()


def test_pytorchs_argument_names_are_refused_with_ours():
    for name, instead in {
        "attn_mask": "mask=~attn_mask, since True means may attend here",
        "key_padding_mask": "mask=~key_padding_mask[:, None, None], since True",
        "is_causal": "causal=True",
        "average_attn_weights": "average_weights",
    }.items():
        with pytest.raises(UnknownNameError, match=f"^{name} is an option of nn.MultiheadAttention") as refused:
            made()(normal(2, 3, 12), **{name: None})
        assert refused.value.hint.startswith(instead)


class LowRank(nn.Module):
    """Another kind of projection, such as adapters and quantisers put in place of a Linear."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.in_features = d_in
        self.both = nn.Sequential(nn.Linear(d_in, 2), nn.Linear(2, d_out))

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x.float()).double()


def test_projections_may_be_others_and_sizes_numpys():
    layer, x = made(), normal(2, 3, 12)
    layer.q_proj = LowRank(12, 12)  # type: ignore[assignment]
    assert layer(x.float(), x, x).dtype == F64
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
    assert python(f"{hidden}; print(hasattr(ch, 'nn'), len(inspect.getmembers(ch)) > 20)") == "False True\n"
