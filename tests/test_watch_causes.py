"""ch.watch(causes=True): g equals autograd's through eager attention, and everything else about it."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import clearhead as ch
from changed import ByHand, Letters, by_hand
from clearhead.errors import RuleError
from clearhead.spelling import spelled
from seeds import fresh
from small_models import small
from watched import FAMILIES, Family, build, in_pieces, inputs, logits

QUICK = ("gpt2", "llama", "mistral", "gemma2", "gpt-oss", "bert", "t5", "vit")
_seed = 0


@pytest.fixture(autouse=True)
def _draw() -> None:
    global _seed
    _seed = int(fresh().integers(1 << 31))


def drawn(family: Family | str, padding: str = "") -> dict[str, torch.Tensor]:
    """A batch of two, drawn anew for each test; the first row is shorter where `padding` says on which side."""
    passed, chance = inputs(family, padding), torch.Generator().manual_seed(_seed + 1)
    for name, x in passed.items():
        if x.is_floating_point():
            passed[name] = torch.randn(x.shape, generator=chance)
        elif name != "attention_mask":
            passed[name] = torch.where((x > 1) & (x < 59), torch.randint(2, 59, x.shape, generator=chance), x)
    return passed


def factors(result: torch.Tensor) -> torch.Tensor:
    """Random numbers of this shape, the same ones within a test."""
    return torch.randn(result.shape, generator=torch.Generator().manual_seed(_seed)).to(result)


def number_of(out: Any) -> torch.Tensor:
    """A number that depends on every output, each with its own factor."""
    return (logits(out) * factors(logits(out))).sum()


def derivatives(model: Any, passed: dict[str, Any], number: Any = number_of) -> list[torch.Tensor]:
    """The derivative by each attention's output, (batch, heads, queries, d_v), in the order in which they ran."""
    with by_hand(model, ByHand()) as hand:
        return list(torch.autograd.grad(number(model(**passed)), hand.made))


def apart(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The size of the difference, relative to that of the whole."""
    assert result.shape == expected.shape
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def assert_derivatives(seen: Any, truth: list[torch.Tensor], limit: float = 1e-4) -> None:
    """Equal in every layer but for rounding, which later layers enlarge."""
    for layer, expected in zip(seen.layers, truth, strict=True):
        assert apart(seen.layer(layer).g, expected) < limit, layer


def watched(model: Any, passed: dict[str, Any], number: Any = number_of, **more: Any) -> Any:
    with ch.watch(model, causes=True, **more) as seen:
        number(model(**passed)).backward()
    return seen


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one.name in QUICK else pytest.mark.gate, id=one.name) for one in FAMILIES]
)
def test_the_derivative_equals_that_of_eager_attention(family: Family):
    """Within 1e-5 of the one computed in float64, or at most 3 times as far from it as eager attention's."""
    model, passed = build(family), drawn(family)
    eagers = derivatives(model, passed)
    seen = watched(model, passed)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in passed.items()}
    if family.name == "gpt-oss":
        model.set_experts_implementation("eager")  # the others take no float64
    truth = derivatives(model.double(), wide)
    assert len(seen) == len(truth)
    for name, expected, by_eager in zip(seen.layers, truth, eagers, strict=True):
        layer = seen.layer(name)
        assert apart(layer.g, expected) < max(1e-5, 3 * apart(by_eager, expected)), name
        assert layer.v.shape[:3] == layer.k.shape[:3]
        assert not layer.g.requires_grad
        assert not layer.v.requires_grad


@pytest.mark.parametrize(("name", "padding"), [("llama", "left"), ("gemma2", "right"), ("bert", "right")])
def test_padding(name: str, padding: str):
    """A loss over the tokens that are real; queries that see only padding differ from eager's, and have g = 0."""
    model, passed = build(name), drawn(name, padding)
    real = passed["attention_mask"].bool()

    def number(out: Any) -> torch.Tensor:
        return logits(out)[real].square().sum()

    truth = derivatives(model, passed, number)
    seen = watched(model, passed, number)
    assert_derivatives(seen, truth)
    assert not any(seen.layer(layer).g.transpose(1, 2)[~real].any() for layer in seen.layers)


def test_the_model_and_its_gradients_are_as_without_causes():
    model, passed = build("qwen3"), drawn("qwen3")
    results = []
    for causes in (False, True):
        model.zero_grad()
        before = {name: x.clone() for name, x in model.state_dict().items()}
        with ch.watch(model, causes=causes):
            out = logits(model(**passed))
            out.square().sum().backward()
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
        results.append([out, *(p.grad for p in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(module._backward_hooks or module._backward_pre_hooks for module in model.modules())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    assert model.config._attn_implementation != "clearhead"


def test_nothing_keeps_the_graph_and_the_graph_keeps_nothing():
    """What is kept are v and g alone: the loss's graph dies with the loss, and g with `seen`."""
    model, passed = build("llama"), drawn("llama")

    def held_by_the_graph(*_: Any) -> None:
        pass

    graph = weakref.ref(held_by_the_graph)
    embedded = model.model.embed_tokens(passed["input_ids"])
    embedded.grad_fn.register_hook(held_by_the_graph)
    del held_by_the_graph
    with ch.watch(model, causes=True) as seen:
        number = number_of(model(inputs_embeds=embedded, use_cache=False))
        number.backward()
    g = weakref.ref(seen.layer(0).g)
    assert graph() is not None
    del number, embedded
    gc.collect()
    assert graph() is None
    assert g() is not None
    with ch.watch(model, causes=True) as again:
        number = number_of(model(**passed))
    number.backward()
    kept = weakref.ref(again.layer(0).g), weakref.ref(again.layer(0).v)
    del again, seen
    gc.collect()
    assert [x() for x in (g, *kept)] == [None] * 3, "the graph of `number` keeps what `seen` held"


def test_q_k_and_v_of_one_projection_are_not_copied():
    model, passed = build("gpt2"), drawn("gpt2")
    projected: list[int] = []
    model.transformer.h[0].attn.c_attn.register_forward_hook(
        lambda *_: projected.append(_[2].untyped_storage().data_ptr())
    )
    seen = watched(model, passed | {"use_cache": False}).layer(0)
    assert {x.untyped_storage().data_ptr() for x in (seen.q, seen.k, seen.v)} == set(projected)


def test_a_model_that_is_dropped_is_freed():
    model, passed = build("bert"), drawn("bert")
    seen = watched(model, passed)
    weights = [weakref.ref(x) for x in model.parameters()]
    del model
    gc.collect()
    assert not any(x() is not None for x in weights)
    assert seen.layer(0).g.shape == (2, 4, 11, 8)


@pytest.mark.parametrize("name", ["llama", "albert"])
def test_gradient_checkpointing(name: str):
    """Albert's layers are one module, so that a checkpoint computes several calls of it again."""
    model = (small(hf.AlbertModel) if name == "albert" else build("llama")).train()
    passed = drawn("llama") | ({} if name == "albert" else {"use_cache": False})
    truth = derivatives(model, passed)
    if name == "albert":
        for group in model.encoder.albert_layer_groups:
            for layer in group.albert_layers:
                _checkpoint(layer)
    else:
        model.activation_checkpointing_enable()
    assert_derivatives(watched(model, passed), truth)


def _checkpoint(layer: Any) -> None:
    forward = layer.forward
    layer.forward = lambda *args, **more: torch.utils.checkpoint.checkpoint(
        lambda x: forward(x, *args[1:], **more), args[0], use_reentrant=False
    )


def test_a_reentrant_checkpoint_brings_no_derivative():
    model = build("llama").train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    with ch.watch(model, causes=True) as seen:
        number_of(model(**drawn("llama"), use_cache=False)).backward()
    with pytest.raises(RuleError, match="checkpointed with use_reentrant=True"):
        seen.cut_effects(0)


def test_the_pieces_of_a_text_with_a_cache():
    """Each pass's outputs get their own derivative; the earlier ones' comes through the cache."""
    model, passed = build("mistral"), drawn("mistral")
    ids = passed["input_ids"]
    truth = derivatives(model, passed, lambda out: logits(out)[:, 7:].square().sum())
    with ch.watch(model, causes=True) as seen:
        _, out, last = in_pieces(model, ids, [7, 3, 1])
        (logits(out).square().sum() + logits(last).square().sum()).backward()
    assert_derivatives(seen, truth)
    assert [seen.layer(layer).v.shape for layer in (0, 1)] == [(2, 2, 11, 8)] * 2


@pytest.mark.parametrize("where", ["inside", "after"])
def test_several_backward_passes_add_up(where: str):
    model, passed = build("gpt2"), drawn("gpt2")
    truth = derivatives(model, passed, lambda out: 3 * logits(out)[:, 4].sum() + logits(out)[:, 7].square().sum())
    with ch.watch(model, causes=True) as seen:
        out = logits(model(**passed))
        if where == "inside":
            (3 * out[:, 4].sum()).backward(retain_graph=True)
    if where == "after":
        (3 * out[:, 4].sum()).backward(retain_graph=True)
    out[:, 7].square().sum().backward()
    assert_derivatives(seen, truth)


def test_a_layer_that_the_number_does_not_depend_on_has_zeros():
    model, passed = build("clip"), drawn("clip")
    seen = watched(model, passed, lambda out: out.text_embeds.square().sum())
    assert {name: bool(seen.layer(name).g.any()) for name in seen.layers} == {
        name: name.startswith("text") for name in seen.layers
    }
    assert seen.layer("vision_model.0").g.shape == (2, 4, 17, 8)


def test_a_backward_pass_to_chosen_tensors_leaves_no_false_zeros():
    model, passed = build("llama"), drawn("llama")
    truth = derivatives(model, passed)
    with ch.watch(model, causes=True) as seen:
        number_of(model(**passed)).backward(inputs=[model.model.layers[1].input_layernorm.weight])
    assert apart(seen.layer(1).g, truth[1]) < 1e-4
    with pytest.raises(RuleError, match=r"layer 0, and a backward pass went to chosen tensors only"):
        seen.contributions(0)
    with ch.watch(model, causes=True) as seen:
        embedded = model.model.embed_tokens(passed["input_ids"])
        torch.autograd.grad(number_of(model(inputs_embeds=embedded)), embedded)
    assert_derivatives(seen, truth)


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_with_change(order: str):
    """g is the derivative by A·v, before a head is scaled; where it is switched off, it is 0."""
    model, passed = build("gpt2"), drawn("gpt2")
    truth = derivatives(model, passed)
    edits = [ch.cut(queries=9, keys=[1, 2], layers=[0]), ch.off(layers=[1], heads=[2])]
    blocks = [ch.change(model, edits), ch.watch(model, causes=True)]
    with blocks[order == "inside"] as one, blocks[order == "outside"] as other:
        number_of(model(**passed)).backward()
    seen = one or other
    assert not seen.layer(1).g[:, 2].any()
    assert seen.layer(0).g.shape == truth[0].shape
    assert float((seen.layer(0).g - truth[0]).norm()) > 1e-3 * float(truth[0].norm())


@pytest.mark.parametrize(
    ("dtype", "auto", "limit"),
    [(torch.bfloat16, False, 8 * 2**-7), (torch.float64, False, 1e-6), (torch.float32, True, 0.1)],
)
def test_other_dtypes_and_autocast(dtype: torch.dtype, auto: bool, limit: float):  # noqa: FBT001
    model, passed = build("phi3").to(dtype), drawn("phi3")
    truth = derivatives(model, passed)
    with torch.autocast("cpu", torch.bfloat16, enabled=auto):
        seen = watched(model, passed)
    assert auto or seen.layer(0).g.dtype == seen.layer(0).v.dtype == dtype
    assert_derivatives(seen, truth, limit)  # rotary angles are float32


class Wrapped(torch.nn.Module):
    """Calls its model's `forward` itself, so that no hook of the model runs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **passed: Any) -> Any:
        return self.inner.forward(**passed)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def frozen(model: Any) -> Any:
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    "wrap", [frozen, Wrapped, torch.nn.DataParallel, pytest.param(compiled, marks=pytest.mark.gate)]
)
def test_frozen_wrapped_and_compiled_models(wrap: Any):
    model, passed = build("bert"), drawn("bert")
    truth = derivatives(model, passed)
    wrapped = wrap(model)
    wrapped(**passed)  # compiled before it is watched
    assert_derivatives(watched(wrapped, passed), truth)
    assert wrap is not frozen or not any(p.requires_grad or p.grad is not None for p in model.parameters())
    with pytest.raises(RuleError, match="runs without a graph"), torch.no_grad(), ch.watch(wrap(model), causes=True):
        wrap(model)(**passed)  # another wrapper, whose hooks are not there


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_without_a_graph_is_refused_before_it_runs(mode: Any):
    model, passed = build("llama"), drawn("llama")
    ran: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(RuleError, match="runs without a graph"), mode(), ch.watch(model, causes=True):
        model(**passed)
    with pytest.raises(RuleError, match=r"model\.generate"), ch.watch(model, causes=True):
        model.generate(**passed, max_new_tokens=2)
    assert not ran
    assert model.config._attn_implementation != "clearhead"


def test_what_cannot_be_is_refused_by_name():
    model, passed = build("bert", attention_probs_dropout_prob=0.5), drawn("bert")
    with (
        pytest.raises(RuleError, match=r"layer 0: causes=True cannot be used with dropout \(0\.5\)"),
        ch.watch(model.train(), causes=True),
    ):
        model(**passed)
    with ch.watch(model.eval()) as seen:
        model(**passed)
    for asking in (seen.cut_effects, seen.contributions, lambda layer: seen.layer(layer).g):
        with pytest.raises(RuleError, match="layer 1 was watched without gradients"):
            asking(1)
    with ch.watch(model, causes=True) as seen:
        model(**passed)
    for asking in (seen.strongest, lambda: seen.cut_effects(0)):
        with pytest.raises(RuleError, match="no backward pass has run"):
            asking()


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "t5", "vit"])
def test_edges_and_heads_are_those_of_all_layers(name: str):
    seen = watched(build(name), drawn(name))
    edges = seen.strongest(30)
    assert len(edges) == 30
    for edge in edges:
        there = float(seen.cut_effects(edge.layer)[edge.batch, edge.head, edge.query, edge.key])
        assert there == pytest.approx(edge.value, rel=1e-4)
    every = np.concatenate([seen.cut_effects(layer)[...].abs().flatten() for layer in seen.layers])
    np.testing.assert_allclose([abs(edge.value) for edge in edges], np.sort(every)[:-31:-1], rtol=1e-4)
    sums = {
        (layer, head): x
        for layer in seen.layers
        for head, x in enumerate(seen.contributions(layer)[...].double().sum((0, 2, 3)).tolist())
    }
    lines = seen.summary()
    np.testing.assert_allclose([line.off for line in lines], [-sums[line[:2]] for line in lines], rtol=1e-2, atol=1e-2)
    said = str(edges), str(lines)
    assert max(len(line) for text in said for line in text.splitlines()) <= 80


def test_edges_have_their_tokens():
    seen = watched(build("t5"), drawn("t5"), tokenizer=Letters())
    edges = seen.strongest(200)
    for edge, (query, key) in zip(edges, edges.tokens, strict=True):
        local = seen.source_tokens if edge.layer.startswith("encoder") else seen.tokens
        other = seen.tokens if edge.layer.startswith("decoder") and "self" in edge.layer else seen.source_tokens
        assert (query, key) == (local[edge.batch][edge.query], other[edge.batch][edge.key])
    query, key = map(spelled, edges.tokens[0])
    assert f"{query} ← {key}" in str(edges).splitlines()[1]
    with pytest.raises(RuleError, match="k is 0"):
        seen.strongest(0)
