"""Names of watched layers, derived from the paths of their modules."""

import pytest

from clearhead.layers.naming import LayerNames, ModulePath

PATHS = {
    "attn": ("", (), False),
    "h.0.attn": ("", ("0",), False),
    "transformer.h.3.attn": ("", ("3",), False),
    "model.layers.11.self_attn": ("", ("11",), False),
    "encoder.layer.0.attention.self": ("encoder", ("0",), False),
    "encoder.layer.0.crossattention.self": ("encoder", ("0",), True),
    "transformer.h.1.crossattention": ("", ("1",), True),
    "model.decoder.layers.5.self_attn": ("decoder", ("5",), False),
    "model.decoder.layers.5.encoder_attn": ("decoder", ("5",), True),
    "decoder.block.2.layer.0.SelfAttention": ("decoder", ("2", "0"), False),
    "decoder.block.2.layer.1.EncDecAttention": ("decoder", ("2", "1"), True),
    "model.vision_tower.vision_model.encoder.layers.7.self_attn": ("vision_tower", ("7",), False),
    "model.language_model.layers.7.self_attn": ("language_model", ("7",), False),
    "crossing.layers.1.self_attn": ("", ("1",), False),
}


def names_of(*paths, counts=()):
    """The names of these modules in a model whose stacks have these numbers of layers."""
    counts = dict(counts)
    names = LayerNames(paths, lambda stack: map(str, range(counts.get(stack, 0))))
    return {path: names.name(path) for path in paths}, names


@pytest.mark.parametrize("path", PATHS)
def test_a_layer_name_gives_stack_numbers_and_side(path):
    assert ModulePath.of(path) == PATHS[path]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (("model.layers.0.self_attn", "model.layers.1.self_attn"), ("0", "1")),
        (("encoder.layers.0.attn", "decoder.layers.0.attn"), ("encoder.0", "decoder.0")),
        (("decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"), ("0.self", "0.cross")),
        (("encoder.layers.0.a", "decoder.layers.0.a", "decoder.layers.0.crossattn"),
         ("encoder.0.self", "decoder.0.self", "decoder.0.cross")),
        (("layers.0.first", "layers.0.second"), ("0", "layers.0.second")),
        (("m.attention", "m.layers.0.attention"), ("m.attention", "0")),
    ],
)  # fmt: skip
def test_names_say_no_more_than_the_model_needs(paths, expected):
    assert names_of(*paths)[0] == dict(zip(paths, expected, strict=True))


def test_a_layer_is_chosen_by_name_path_and_number_from_either_end():
    path = "decoder.layers.1.self_attn"
    _, names = names_of(path, "encoder.layers.0.self_attn", counts={"decoder.layers": 3})
    assert names.choices(path) == {"decoder.1", path, "1", "-2"}
    assert names.choices("pooler.attention") == {"pooler.attention"}
