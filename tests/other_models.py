"""Other people's models, small and with random weights, that attend by PyTorch's own function."""

import os
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "torch"

import torch
from torch import Tensor, nn

Model = tuple[nn.Module, Callable[[], Tensor], Tensor]  # the model, its call, and an input with a gradient


def encoder() -> Model:
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3), torch.randn(4, 512, 256, requires_grad=True)
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


def keras() -> Model:
    import keras

    tokens = keras.Input((384, 128))
    attended = keras.layers.MultiHeadAttention(4, 32, flash_attention=None)(tokens, tokens, use_causal_mask=True)
    model = keras.Model(tokens, keras.layers.LayerNormalization()(tokens + attended))
    x = torch.randn(2, 384, 128, requires_grad=True)
    return model, lambda: model(x), x


MODELS = {
    "nn.TransformerEncoder": encoder,
    "diffusers UNet": unet,
    "Keras attention": keras,
}


def results(call: Callable[[], Tensor], x: Tensor, model: nn.Module) -> list[Tensor]:
    """The output and the gradients of its squares, of the input and of every parameter."""
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    output = call()
    grads = torch.autograd.grad(output.square().mean(), leaves, allow_unused=True)
    return [output.detach(), *(torch.zeros_like(y) if g is None else g for g, y in zip(grads, leaves, strict=True))]


def difference(result: Tensor, theirs: Tensor) -> float:
    return ((result - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)).item()
