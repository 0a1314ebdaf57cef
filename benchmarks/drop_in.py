"""Other people's models with and without `clearhead.torch.activate()`: differences, and times side by side.

    pip install --no-deps timm torchvision && pip install diffusers keras
    python benchmarks/drop_in.py [model …]

Every model is built from a small configuration, with random weights, and runs on the CPU with PyTorch's own attention
and with clearhead's in turns. Printed are the largest differences of outputs and gradients, each divided by its largest
value; how many times as fast the model is with clearhead, in evaluation and with a backward pass (the median over the
rounds); and how many attention calls clearhead computed in one evaluation, and how many PyTorch. torchvision's builds
need a GPU's libraries here; timm imports it, and the models do not use its operators.
"""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import torch
from torch import Tensor, nn

import clearhead.torch
from clearhead.bench.measure import interleaved, ratio

ROUNDS, SECONDS = 5, 0.2
Model = tuple[nn.Module, Callable[[], Tensor], Tensor]  # the model, its call, and an input with a gradient


def encoder() -> Model:
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3), torch.randn(4, 512, 256, requires_grad=True)
    return model, lambda: model(x), x


def vit() -> Model:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    x = torch.randn(2, 3, 224, 224, requires_grad=True)
    return model, lambda: model(x), x


def unet() -> Model:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    x, text = torch.randn(1, 4, 32, 32, requires_grad=True), torch.randn(1, 77, 32)
    return model, lambda: model(x, torch.tensor([3]), text).sample, x


def transformer() -> Model:
    from diffusers import Transformer2DModel

    model = Transformer2DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=32,
        num_layers=2,
        cross_attention_dim=64,
        norm_num_groups=8,
    )
    x, text = torch.randn(1, 32, 24, 24, requires_grad=True), torch.randn(1, 77, 64)
    return model, lambda: model(x, encoder_hidden_states=text).sample, x


def keras() -> Model:
    import keras

    tokens = keras.Input((384, 128))
    attended = keras.layers.MultiHeadAttention(4, 32, flash_attention=None)(tokens, tokens, use_causal_mask=True)
    model = keras.Model(tokens, keras.layers.LayerNormalization()(tokens + attended))
    x = torch.randn(2, 384, 128, requires_grad=True)
    return model, lambda: model(x), x


MODELS = {
    "nn.TransformerEncoder": encoder,
    "timm ViT": vit,
    "diffusers UNet": unet,
    "diffusers transformer": transformer,
    "Keras attention": keras,
}


def without_torchvisions_operators() -> None:
    """Name the operators that torchvision's Python files want, so that they import where its library does not load."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms", "qroi_align"):
        library.define(f"{name}(Tensor x) -> Tensor")
    for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.define(f"_{name}_backward(Tensor x) -> Tensor")
    _kept.append(library)


_kept: list[torch.library.Library] = []


def results(call: Callable[[], Tensor], x: Tensor, model: nn.Module) -> list[Tensor]:
    """The output and the gradients of its squares, of the input and of every parameter."""
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    output = call()
    grads = torch.autograd.grad(output.square().mean(), leaves, allow_unused=True)
    return [output.detach(), *(torch.zeros_like(y) if g is None else g for g, y in zip(grads, leaves, strict=True))]


def difference(result: Tensor, theirs: Tensor) -> float:
    return ((result - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)).item()


def active(call: Callable[[], Any]) -> Any:
    with clearhead.torch.active():
        return call()


def measured(make: Callable[[], Model]) -> str:
    torch.manual_seed(0)
    model, call, x = make()
    model.eval()
    theirs, ours = results(call, x, model), active(lambda: results(call, x, model))
    largest = max(y.abs().max().item() for y in theirs[1:])
    gradient = max((a - b).abs().max().item() for a, b in zip(ours[1:], theirs[1:], strict=True)) / largest
    evaluate = torch.no_grad()(call)
    active(evaluate)
    routes = clearhead.torch.explain().routes
    calls = [sum(route.count for route in routes if route.computed_by == by) for by in ("clearhead", "PyTorch")]
    train = lambda: results(call, x, model)  # noqa: E731
    rates = []
    for run in (evaluate, train):
        times = interleaved({"ours": lambda run=run: active(run), "theirs": run}, rounds=ROUNDS, slice_seconds=SECONDS)
        rates.append(ratio(times["theirs"], times["ours"]))
    output = difference(ours[0], theirs[0])
    return f"{output:10.1e} {gradient:10.1e} {rates[0]:10.2f} {rates[1]:10.2f} {calls[0]:10} {calls[1]:8}"


def main(chosen: list[str]) -> None:
    if find_spec("torchvision"):
        without_torchvisions_operators()
    print(f"{'':24}{'output':>10} {'gradients':>10} {'evaluated':>10} {'trained':>10} {'clearhead':>10} {'PyTorch':>8}")
    for name, make in MODELS.items():
        if not chosen or name in chosen:
            print(f"{name:24}{measured(make)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
