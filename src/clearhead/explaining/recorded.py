"""The residual stream of a Transformers model: what its modules gave in one run, and whether that adds up.

Nothing is assumed of a model's class. In each layer, the attention module and the last module that is neither attention
nor a norm are taken for what is added to the stream, through the norms that read exactly their output; a norm is the
formula that gives its output. All of it is checked by sums: where these are not the model's numbers, there is no way.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.explaining.stream import Norm, NoWay, PartKind, Stream, Written
from clearhead.models.modules import attention_modules, is_attention, is_norm, output_module
from clearhead.models.protocol import ForwardPass, LayerRun

_TOLERANCE = 1e-4  # float32's rounding over a whole model stays far below, and a part left out or scaled far above


class Call(NamedTuple):
    """What a module read and returned at the position; `input` is None for what is no vector."""

    module: Any
    input: Array | None
    output: Array


@dataclass(slots=True)
class Recording:
    """The calls of one run: each layer's and those of its children, in order, and of norms outside the layers."""

    inner: Any
    position: int
    layers: list[Any]
    blocks: list[Call] = field(default_factory=list)
    children: list[list[Call]] = field(default_factory=list)
    norms: list[Call] = field(default_factory=list)
    head: Call | None = None


@contextmanager
def recorded(inner: Any, layers: int, position: int) -> Iterator[Recording]:
    """Inside, a run of the model is recorded at one position: O(layers·d_model) memory."""
    kept = Recording(inner, position, _blocks(inner, layers))
    hooks = ExitStack()

    def follow(module: Any, keep: Any) -> None:
        def behind(module: Any, args: Any, named: Any, out: Any) -> None:
            read = args[0] if args else named.get("hidden_states")
            output = _vector(out[0] if isinstance(out, tuple) else out, position)
            if output is not None:
                keep(Call(module, _vector(read, position), output))

        hooks.callback(module.register_forward_hook(behind, with_kwargs=True).remove)

    with hooks:
        for block in kept.layers:
            follow(block, kept.blocks.append)
            kept.children.append([])
            for child in block.children():
                follow(child, kept.children[-1].append)
        inside = {id(module) for block in kept.layers for module in block.modules()}
        for module in inner.modules():
            if id(module) not in inside and is_norm(module):
                follow(module, kept.norms.append)
        head = inner.get_output_embeddings() if kept.layers else None
        if head is not None:
            follow(head, lambda call: setattr(kept, "head", call))
        yield kept


def of_transformers(kept: Recording, run: ForwardPass) -> Stream | NoWay:
    """The stream of the recorded run, or why its parts do not add up to the logits."""
    if run.logits is None or kept.head is None or len(kept.blocks) != len(kept.layers) or not kept.layers:
        return NoWay("no way parts", {})
    written: list[Written] = []
    for number, (block, calls) in enumerate(zip(kept.blocks, kept.children, strict=True)):
        ran = run.layers[number] if len(run.layers) == len(kept.layers) else None
        parts = _layer(number, block, calls, ran, kept.position)
        if parts is None:
            return NoWay("no way parts", {})
        written += parts
        assert block.input is not None
        off = _off(block.input + sum(part.vector for part in parts), block.output)
        if off > _TOLERANCE:
            return NoWay("no way sum", {"layer": number, "off": off})
    first, last = kept.blocks[0].input, kept.head.input
    assert first is not None
    end = next((call for call in reversed(kept.norms) if _same(call.output, last)), None)
    norm = _fitted(end)
    if end is None or norm is None:
        return NoWay("no way norm", {})
    off = _off(first + sum(part.vector for part in written), end.input)
    if off > _TOLERANCE:
        return NoWay("no way sum", {"layer": len(kept.layers) - 1, "off": off})
    scaling = _scaling(kept, run.logits[kept.position].astype(np.float64))
    if scaling is None:
        return NoWay("no way logits", {})
    scale, cap = scaling
    weight, bias = kept.head.module.weight, getattr(kept.head.module, "bias", None)

    def unembedding(token: int) -> tuple[Array, float]:
        return scale * _numbers(weight[token]), 0.0 if bias is None else scale * float(bias[token].detach())

    embedded = Written("embeddings", None, first)
    logits = scale * kept.head.output
    return Stream(kept.position, len(run.logits), [embedded, *written], norm, unembedding, logits, cap)


def _layer(number: int, block: Call, calls: list[Call], ran: LayerRun | None, position: int) -> list[Written] | None:
    """What attention and the MLP of one layer wrote; None where they cannot be told apart."""
    norms = [call for call in calls if is_norm(call.module)]
    kinds = [(call, any(map(is_attention, call.module.modules()))) for call in calls if not is_norm(call.module)]
    attending = [call for call, attends in kinds if attends]
    mlps = [call for call, attends in kinds if not attends and "Dropout" not in type(call.module).__name__]
    if block.input is None or len(attending) != 1 or not mlps:
        return None

    def part(kind: PartKind, call: Call, inputs: list[Call]) -> Written | None:
        before = next((norm for norm in norms if any(_same(norm.output, each.input) for each in inputs)), None)
        after = next((norm for norm in norms if _same(norm.input, call.output)), None)
        wrote = _fitted(after)
        if after is not None and wrote is None:
            return None
        return Written(kind, number, (after or call).output, read=_fitted(before), wrote=wrote)

    attention, mlp = part("attention", attending[0], attending), part("mlp", mlps[-1], mlps)
    if attention is None or mlp is None:
        return None
    heads, bias = (None, None) if ran is None else _heads(attending[0], ran, position)
    if heads is not None and bias is not None and attention.wrote is not None:
        shift = 0 if attention.wrote.bias is None else attention.wrote.bias
        heads, bias = attention.wrote.linear(heads), attention.wrote.linear(bias) + shift
    sizes = () if ran is None else (len(ran.q), ran.q.shape[-1])
    inner = _inner(mlps[-1], len(mlp.vector))
    return [attention._replace(heads=heads, bias=bias, sizes=sizes), mlp._replace(sizes=inner)]


def _heads(attention: Call, ran: LayerRun, position: int) -> tuple[Array | None, Array | None]:
    """What each head wrote, (heads, d_model), and W^O's bias; both None unless they add up to attention's output."""
    paths = dict(attention.module.named_modules())
    core = next(iter(attention_modules(paths)), None)
    if core is None:
        return None, None
    out = output_module(paths, core)
    weight = getattr(out, "weight", None)
    heads = ran.heads[:, position].astype(np.float64)  # (heads, d_v)
    if weight is None or weight.ndim != 2:
        return None, None
    whole = _numbers(weight)
    if not _is_conv(out):
        whole = whole.T
    if whole.shape != (heads.size, len(attention.output)):
        return None, None
    by_head = np.einsum("hv,hvd->hd", heads, whole.reshape(*heads.shape, -1))
    bias = getattr(out, "bias", None)
    rest = np.zeros(len(attention.output)) if bias is None else _numbers(bias)
    return (by_head, rest) if _off(by_head.sum(0) + rest, attention.output) < _TOLERANCE else (None, None)


def _fitted(call: Call | None) -> Norm | None:
    """The norm as a formula, with the σ that gives this output; None where no formula does, or there is no norm."""
    if call is None or call.input is None:
        return None
    x, y = call.input, call.output
    weight, shift = (getattr(call.module, name, None) for name in ("weight", "bias"))
    bias = None if shift is None else _numbers(shift)
    rest = y if bias is None else y - bias
    weights = [np.ones_like(x)] if weight is None else [_numbers(weight), 1 + _numbers(weight)]  # Gemma's keep w - 1
    fits = []
    for factor, centred in product(weights, (True, False)):
        centre = x - x.mean() if centred else x
        direction = factor * centre
        share = float(direction @ rest) / float(direction @ direction or 1)
        if share <= 0 or _off(direction * share + (y - rest), y) > _TOLERANCE:
            continue
        spread = float(np.sqrt(np.mean(centre**2)))
        lengths = float(np.linalg.norm(x)), float(np.linalg.norm(y))
        fits.append((abs(np.log(share * spread)), Norm(factor, bias, centred, 1 / share, *lengths)))
    return min(fits, key=lambda pair: pair[0])[1] if fits else None


def _scaling(kept: Recording, logits: Array) -> tuple[float, float | None] | None:
    """What the unembedding's output is multiplied by, and the cap c of c·tanh(x/c), to give the model's logits."""
    assert kept.head is not None
    raw = kept.head.output
    cap = getattr(kept.inner.config.get_text_config(), "final_logit_softcapping", None)
    if cap and _off(cap * np.tanh(raw / cap), logits) < _TOLERANCE:
        return 1.0, float(cap)
    scale = float(raw @ logits) / float(raw @ raw or 1)
    if _off(scale * raw, logits) > _TOLERANCE:
        return None
    return (1.0 if abs(scale - 1) < _TOLERANCE else scale), None


def _inner(mlp: Call, d_model: int) -> tuple[int, ...]:
    """The MLP's inner width: what its last product reads; nothing where there are experts."""
    if "expert" in " ".join(name for name, _ in mlp.module.named_modules()):
        return ()
    for module in reversed(list(mlp.module.modules())):
        weight = getattr(module, "weight", None)
        if weight is not None and weight.ndim == 2:
            width, made = weight.shape if _is_conv(module) else reversed(weight.shape)
            if made == d_model:
                return (width,)
    return ()


def _blocks(inner: Any, layers: int) -> list[Any]:
    """The model's layers: the list of modules of that length which attend."""
    for module in inner.modules():
        listed = type(module).__name__ == "ModuleList" and len(module) == layers
        if listed and all(any(map(is_attention, block.modules())) for block in module):
            return list(module)
    return []


def _is_conv(module: Any) -> bool:
    """Is it GPT-2's Conv1D, which alone keeps its weight as (d_in, d_out)?"""
    return type(module).__name__ == "Conv1D"


def _vector(x: Any, position: int) -> Array | None:
    """The vector at the position of the one text; None for anything but (batch, tokens, width) or (tokens, width)."""
    if getattr(x, "ndim", 0) not in (2, 3) or x.shape[-2] <= position:
        return None
    return _numbers(x.reshape(-1, x.shape[-1])[position])


def _numbers(x: Any) -> Array:
    return np.array(x.detach().cpu().double().numpy())


def _same(x: Array | None, y: Array | None) -> bool:
    return x is not None and y is not None and np.array_equal(x, y)


def _off(x: Array, y: Array | None) -> float:
    """The distance of two vectors, over the length of the second."""
    if y is None or x.shape != y.shape:
        return float("inf")
    return float(np.linalg.norm(x - y) / (np.linalg.norm(y) or 1))
