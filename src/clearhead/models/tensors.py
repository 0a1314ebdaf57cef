"""Turns a file's tensors into those of a decoder, under GGUF's names.

It puts rows in the decoder's order, splits fused projections and experts, and refuses missing, misshapen and surplus
tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import numpy as np

from clearhead.core.axes import Array
from clearhead.errors import FileError
from clearhead.models.families import FAMILIES, Config, NotInNumPyError
from clearhead.models.weights import Stored

_OPTIONAL, _SPARE = "?", "~"  # before a name: the model, or this layer of it, may lack the tensor


def renamed(arrays: Mapping[str, tuple[str, Array]], config: Config) -> dict[str, Stored]:
    """Rename arrays, each given with the name of its dtype, to GGUF's names.

    A tensor that the family does not have keeps its name, and is refused later.
    """
    family, result = FAMILIES[config.family], {}
    names = family.names
    for key, (kind, array) in arrays.items():
        words = key.removeprefix("transformer.").split(".")
        numbers = [word for word in words if word.isdecimal()]
        pattern = ".".join("{}" if word.isdecimal() else word for word in words)
        if pattern not in names and f"model.{pattern}".rpartition(".")[0] in names:  # saved without its head
            pattern = f"model.{pattern}"
        stem, _, suffix = pattern.rpartition(".")
        known = names.get(pattern) or (f"{names[stem]}.{suffix}" if stem in names else "")
        name = known.format(*numbers) or key
        if (array.ndim == 3 and kind != "U8") or (family.transposed and array.ndim == 2 and name.startswith("blk.")):
            array = array.swapaxes(-1, -2)
        if name in result:
            raise FileError(f"the weights have `{name}` twice, the second time as `{key}`.")
        tensor = Stored(kind, array.shape, array)
        if family.less_one and "norm" in name:
            tensor = Stored("F32", array.shape, tensor.rows() + 1)
        result[name] = tensor.part(family.learned, len(array)) if family.learned and "position" in name else tensor
    return in_order(result, config, "folder")


def in_order(tensors: dict[str, Stored], config: Config, form: str) -> dict[str, Stored]:
    """Put the rows of W^Q, W^K and fused projections in the order that this decoder expects."""
    family, result, d_k = FAMILIES[config.family], dict(tensors), config.sizes[0].d_k
    rope = next(filter(None, config.ropes), None)
    for name, tensor in tensors.items():
        part, rows = name.rpartition(".")[0].rpartition(".")[2], np.arange(prod(tensor.shape[:1]))
        turns = {"attn_q": config.heads, "attn_k": config.kv_heads, "attn_qkv": config.heads + config.kv_heads}
        turning = turns.get(part, 0)
        values = config.kv_heads * d_k if part == "attn_qkv" else 0  # values, which do not turn, come last
        if part == "attn_qkv" and family.by_head and form == "folder" and len(rows) % (config.kv_heads * d_k) == 0:
            each = rows.reshape(config.kv_heads, -1, d_k)
            order = np.concatenate([each[:, :-2].ravel(), each[:, -2].ravel(), each[:, -1].ravel()])
        elif turning and rope is not None and form in family.neighbours and len(rows) == turning * d_k + values:
            order, width = rows.copy(), 2 * len(rope.rates)
            heads = order[: turning * d_k].reshape(turning, d_k)
            heads[:, :width] = heads[:, :width].reshape(turning, -1, 2).swapaxes(1, 2).reshape(turning, width)
        else:
            continue
        result[name] = replace(tensor, order=order)
    return result


def checked(path: object, tensors: dict[str, Stored], config: Config) -> dict[str, Stored]:
    """Split fused tensors, and check that the decoder has exactly these tensors. Raises FileError if not.

    A tensor that the computation would not use is refused: leaving out a bias would change every answer silently.
    """
    whole, belong = _cut(tensors, config), "are the sizes and the weights of the same model?"
    parts = {name.split(".", 2)[-1] for name in whole}  # of any layer: what one layer has, every layer has
    known, misshapen = dict[str, Stored](), ""
    for wanted, shapes in expected(config):  # one by one: sizes that are wrong fail at the first missing tensor
        name = wanted.lstrip(_OPTIONAL + _SPARE)
        if name in whole:
            known[name] = whole[name]
            if whole[name].shape not in shapes:
                misshapen = misshapen or f"`{name}` has shape {whole[name].shape}, but its sizes ask for {shapes[0]}."
        elif name == wanted or (wanted.startswith("?blk.") and name.split(".", 2)[-1] in parts):
            what = f"the weights lack `{name}` (its name in GGUF), which a decoder of family {config.family} has."
            raise FileError(f"{path}: {misshapen or what}", belong)
    surplus = sorted(whole.keys() - known.keys())
    if surplus:
        raise NotInNumPyError(
            f"{path}: a decoder of family {config.family} has no `{surplus[0]}` ({len(surplus)} such tensors in all).",
            "answers would be wrong without it; Transformers may run the model's folder.",
        )
    if misshapen:
        raise FileError(f"{path}: {misshapen}", belong)
    return known | _of_layers(known, config)


def expected(config: Config) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Yield each tensor's name and allowed shapes; names begin with ? or ~ if the tensor may be missing."""
    d, given = config.d_model, config.d_input
    yield "token_embd.weight", ((config.vocabulary, d),)
    if FAMILIES[config.family].learned is not None:
        yield "position_embd.weight", ((config.positions, d),)
    if "token_embd_norm" in FAMILIES[config.family].names.values():
        yield from _vector("token_embd_norm", d)
    yield from _vector("output_norm", d)
    if not config.tied:
        yield "output.weight", ((config.vocabulary, d),)
    yield "?output.bias", ((config.vocabulary,),)
    if given:
        yield from _vector("per_layer_proj_norm", given)
        yield "per_layer_model_proj.weight", ((config.layers * given, d),)
        yield "per_layer_token_embd.weight", ((config.vocabulary, config.layers * given),)
    for layer, size in enumerate(config.sizes):
        name, queries, keys = f"blk.{layer}.", config.heads * size.d_k, size.kv_heads * size.d_k
        spare = () if size.source == layer else ("attn_k", "attn_v", "attn_k_norm")  # some files have them, unused
        widths = {"attn_q_norm": (size.d_k, queries), "attn_k_norm": (size.d_k, keys), "attn_sinks": (config.heads,)}
        for part in (*FAMILIES[config.family].vectors, *(["post_norm"] if given else [])):
            yield from _vector(_SPARE * (part in spare) + name + part, *widths.get(part, (d,)))
        yield f"{_OPTIONAL}{name}layer_output_scale.weight", ((1,),)
        matrices = {"attn_q": (queries, d), "attn_k": (keys, d), "attn_output": (d, queries)}
        matrices |= {"attn_v": (keys, d)} if size.values else {}
        matrices |= {"ffn_gate.input": (given, d), "ffn_down.input": (d, given)} if given else {}
        experts, inner = [""], size.d_mlp
        if config.experts:
            experts, inner = [f".{expert}" for expert in range(config.experts)], config.d_expert
            matrices["ffn_gate_inp"] = config.experts, d
        for expert in experts:
            matrices |= {f"ffn_up{expert}": (inner, d), f"ffn_down{expert}": (d, inner)}
            if config.gated:
                matrices[f"ffn_gate{expert}"] = inner, d
        for part, shape in matrices.items():
            yield f"{_SPARE * (part in spare)}{name}{part}.weight", (shape,)
            yield f"{_SPARE if part in spare else _OPTIONAL}{name}{part}.bias", (shape[:1],)


def _vector(name: str, *widths: int) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    shapes = tuple((width,) for width in widths)
    yield f"{name}.weight", shapes
    yield f"{name if name.startswith(_SPARE) else _OPTIONAL + name.removeprefix(_OPTIONAL)}.bias", shapes


def _cut(tensors: dict[str, Stored], config: Config) -> dict[str, Stored]:
    """Split fused projections into q, k, v, and into an MLP's gate and up."""
    result: dict[str, Stored] = {}
    for name, tensor in _of_experts(tensors).items():
        layer, _, rest = name.removeprefix("blk.").partition(".")
        part, _, kind = rest.rpartition(".")
        size = config.sizes[int(layer) if layer.isdecimal() and int(layer) < config.layers else 0]
        keys = size.kv_heads * size.d_k
        parts = {"attn_qkv": {"attn_q": config.heads * size.d_k, "attn_k": keys, "attn_v": keys}}
        if config.gated:
            parts["ffn_up"] = {"ffn_gate": size.d_mlp, "ffn_up": size.d_mlp}
        widths, start = parts.get(part, {}), 0
        if tensor.shape[:1] != (sum(widths.values()),):
            widths, result[name] = {}, tensor
        for each, width in widths.items():
            if f"blk.{layer}.{each}.{kind}" in tensors and each != part:
                raise FileError(f"the weights have `blk.{layer}.{each}.{kind}` twice, the second time in `{name}`.")
            result[f"blk.{layer}.{each}.{kind}"] = tensor.part(start, start + width)
            start += width
    for name in list(result) if FAMILIES[config.family].parallel else ():  # the MLP may read through attention's norm
        if ".attn_norm." in name:
            result.setdefault(name.replace("attn_norm", "ffn_norm"), result[name])
    return result


def _of_layers(tensors: dict[str, Stored], config: Config) -> dict[str, Stored]:
    """Add what files leave out: norms that are all 1, and value projections that are the keys'."""
    result: dict[str, Stored] = {}
    for layer, size in enumerate(config.sizes):
        name = f"blk.{layer}."
        for part in FAMILIES[config.family].ones:
            result[f"{name}{part}.weight"] = Stored("F32", (size.d_k,), np.ones(size.d_k, np.float32))
        for kind in ("weight", "bias"):
            if not size.values and (keys := tensors.get(f"{name}attn_k.{kind}")):
                result[f"{name}attn_v.{kind}"] = keys
    return result


def _of_experts(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Split tensors of all experts into one per expert, and fused gate and up into two."""
    result: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith("_exps") or kind == "scales":
            result |= {} if kind == "scales" else {name: tensor}
            continue
        if kind == "blocks" and (scales := tensors.get(f"{stem}.scales")) and scales.shape == tensor.shape[:-1]:
            tensor = replace(tensor, shape=(*tensor.shape[:2], 32 * tensor.shape[2]), scales=scales.data)
            kind = "weight"
        stem = stem.removesuffix("_exps")
        for number in range(tensor.shape[0]):
            one = tensor.expert(number)
            if stem.endswith("_pairs"):
                rows = np.arange(one.shape[0])
                for part, first in (("gate", 0), ("up", 1)):
                    half = replace(one, shape=(len(rows) // 2, *one.shape[1:]), order=rows[first::2])
                    result[f"{stem.removesuffix('pairs')}{part}.{number}.{kind}"] = half
            else:
                result[f"{stem}.{number}.{kind}"] = one
    return result
