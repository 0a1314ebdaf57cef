"""ch.convert: PyTorch's layers computed by clearhead, in modules that know nothing of it."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.errors import DtypeError, RuleError, ShapeError

F64 = torch.float64
OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "batch first": {"batch_first": True},
    "other widths": {"kdim": 5, "vdim": 7},
    "no bias": {"bias": False, "batch_first": True},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
}
MASKS = ("none", "bool", "bool for each head", "float", "padding", "float padding", "bool and padding", "causal")


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def layers(**options: Any) -> tuple[nn.MultiheadAttention, nn.Module]:
    """A layer with no parameter at its initial value, and a converted copy."""
    theirs = nn.MultiheadAttention(12, 3, dtype=F64, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    return theirs, ch.convert(copy.deepcopy(theirs))


def inputs(options: dict[str, Any], queries: int = 4, keys: int = 5) -> list[Tensor]:
    widths = (queries, 12), (keys, options.get("kdim", 12)), (keys, options.get("vdim", 12))
    first = bool(options.get("batch_first"))
    return [torch.randn((2, n, d) if first else (n, 2, d), dtype=F64, requires_grad=True) for n, d in widths]


def masks(name: str, queries: int = 4, keys: int = 5) -> dict[str, Any]:
    forbidden = torch.rand(6, queries, keys) < 0.3
    forbidden[..., 0] = False  # every query sees a key
    padding = torch.tensor([[False] * keys, [False] * (keys - 2) + [True] * 2])
    causal = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    return {
        "none": {},
        "bool": {"attn_mask": forbidden[0]},
        "bool for each head": {"attn_mask": forbidden},
        "float": {"attn_mask": torch.randn(6, queries, keys, dtype=F64)},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": torch.randn(2, keys, dtype=F64)},
        "bool and padding": {"key_padding_mask": padding, "attn_mask": causal},
        "causal": {"attn_mask": causal, "is_causal": True},
    }[name]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_outputs_weights_and_gradients_are_those_of_pytorch(options: str, mask: str):
    theirs, ours = layers(**OPTIONS[options])
    passed, how = inputs(OPTIONS[options]), masks(mask)
    if options == "extra keys" and mask == "causal":
        del how["is_causal"]  # PyTorch puts extra keys last, where a causal query does not see them
    for need in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        with torch.no_grad():
            close(ours(*passed, **how, **need), theirs(*passed, **how, **need))
        result = []
        for layer in (ours, theirs):
            output, weights = layer(*passed, **how, **need)
            loss = output.square().sum() + (0.0 if weights is None else weights.square().sum())
            result.append((output, weights, *torch.autograd.grad(loss, [*passed, *layer.parameters()])))
        close(*result)


def test_one_sequence_without_a_batch():
    theirs, ours = layers(batch_first=True)
    x = torch.randn(4, 12, dtype=F64)
    how = {"key_padding_mask": torch.tensor([False, False, True, False]), "attn_mask": torch.ones(3, 4, 4).triu(1) > 0}
    with torch.no_grad():
        close(ours(x, x, x, **how), theirs(x, x, x, **how))


def test_parameters_hooks_and_names_stay():
    model = nn.Sequential(nn.Linear(12, 12), nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0))
    before, parameters, called = model.state_dict(), list(model.parameters()), []
    attention = model[1].self_attn
    attention.register_forward_hook(lambda *_: called.append(True))
    assert ch.convert(model) is model
    assert model[1].self_attn is attention
    assert isinstance(attention, ch.nn.MultiHeadAttention)
    assert isinstance(attention, nn.MultiheadAttention)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == list(before)
    model(torch.randn(3, 2, 12)).sum().backward()
    assert called
    assert attention.in_proj_weight.grad is not None
    model.load_state_dict(before)
    ch.convert(model)  # a second time: nothing to do
    ch.convert(model, back=True)
    assert type(attention) is nn.MultiheadAttention


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("norm_first", [True, False])
def test_pytorchs_transformers(norm_first: bool):  # noqa: FBT001
    theirs = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=F64)
    ours = ch.convert(copy.deepcopy(theirs))
    x, y = torch.randn(2, 5, 8, dtype=F64), torch.randn(2, 4, 8, dtype=F64)
    how = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(4, dtype=F64), "tgt_is_causal": True}
    result = []
    for model in (ours, theirs):
        output = model(x, y, **how)
        result.append([output, *torch.autograd.grad(output.square().sum(), list(model.parameters()))])
    close(*result)
    with torch.no_grad():
        close(ours.eval()(x, y, **how), theirs.eval()(x, y, **how))


def test_the_encoder_calls_the_converted_layer_and_keeps_nested_tensors_to_pytorch(recwarn: pytest.WarningsRecorder):
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=F64), 2).eval()
    ours = ch.convert(copy.deepcopy(theirs))
    x, padding = torch.randn(2, 5, 8, dtype=F64), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        close(ours(x), theirs(x))
        close(ours(x, src_key_padding_mask=padding), theirs(x, src_key_padding_mask=padding))
        called: list[bool] = []
        ours.layers[1].self_attn.out_proj.register_forward_hook(lambda *_: called.append(True))
        ours(x)
    assert called


def test_a_query_without_keys_gives_zero():
    theirs, ours = layers(batch_first=True, bias=False)
    x, padding = torch.randn(1, 3, 12, dtype=F64), torch.ones(1, 3, dtype=torch.bool)
    with torch.no_grad():
        assert theirs(x, x, x, key_padding_mask=padding)[0].isnan().all()
        output, weights = ours(x, x, x, key_padding_mask=padding)
    assert (output == 0).all()
    assert (weights == 0).all()


def test_dropout_in_training():
    layer = ch.convert(nn.MultiheadAttention(8, 2, dropout=0.5))
    x = torch.randn(6, 1, 8)
    assert not torch.equal(layer(x, x, x, need_weights=False)[0], layer(x, x, x, need_weights=False)[0])
    assert (layer(x, x, x, average_attn_weights=False)[1] == 0).any()  # the dropped weights, as PyTorch gives them


def test_copies_pickles_and_bfloat16():
    _, layer = layers(batch_first=True)
    x = torch.randn(1, 3, 12, dtype=F64)
    with torch.no_grad():
        output = layer(x, x, x)[0]
        close(copy.deepcopy(layer)(x, x, x)[0], output)
        close(pickle.loads(pickle.dumps(layer))(x, x, x)[0], output)
        torch.save(layer, file := io.BytesIO())
        close(torch.load(io.BytesIO(file.getvalue()), weights_only=False)(x, x, x)[0], output)
        half = layer.to(torch.bfloat16)
        assert [y.dtype for y in half(*(x.bfloat16(),) * 3)] == [torch.bfloat16] * 2


@pytest.mark.gate
def test_compiled():
    _, layer = layers(batch_first=True)
    x = torch.randn(1, 3, 12, dtype=F64)
    compiled = torch.compile(lambda x: layer(x, x, x, need_weights=False)[0], backend="aot_eager", fullgraph=True)
    close(compiled(x), layer(x, x, x, need_weights=False)[0])


class Subclass(nn.MultiheadAttention):
    pass


def test_subclasses_stay_as_they_are():
    model = nn.ModuleList([Subclass(8, 2), nn.MultiheadAttention(8, 2)])
    assert [type(part).__name__ for part in ch.convert(model)] == ["Subclass", "ConvertedAttention"]


def test_wrong_arguments():
    with pytest.raises(DtypeError, match=r"^module is a int: expected a torch\.nn\.Module\.$"):
        ch.convert(3)  # type: ignore[arg-type]
    with pytest.raises(RuleError, match=r"^module is a Linear without a torch\.nn\.MultiheadAttention: there is"):
        ch.convert(nn.Linear(2, 2))
    with pytest.raises(RuleError, match="back"):
        ch.convert(nn.MultiheadAttention(8, 2), back=1)  # type: ignore[arg-type]
    layer, x = ch.convert(nn.MultiheadAttention(8, 2, batch_first=True)), torch.randn(2, 3, 8)
    with pytest.raises(ShapeError, match=r"^attn_mask has shape \(3, 4\): expected \(queries, keys\), \(3, 3\), or"):
        layer(x, x, x, attn_mask=torch.ones(3, 4), need_weights=False)
    with pytest.raises(ShapeError, match=r"^key_padding_mask has shape \(3, 2\): expected \(batch, keys\), \(2, 3\)"):
        layer(x, x, x, key_padding_mask=torch.ones(3, 2) > 0, need_weights=False)
    with pytest.raises(RuleError, match=r"^is_causal is True without attn_mask"):
        layer(x, x, x, is_causal=True, need_weights=False)
