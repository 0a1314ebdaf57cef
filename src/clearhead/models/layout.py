"""Which tensors a decoder has, and of which shapes: fused ones are cut, missing, strange and surplus ones refused."""

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

from clearhead.core.room import check_room_for_file
from clearhead.errors import FileError
from clearhead.models.families import Config
from clearhead.models.weights import Stored

_OPTIONAL = "?"  # before a name: the model may lack it


def checked(
    path: object,
    tensors: dict[str, Stored],
    config: Config,
    spelling: Callable[[str, Config], str] = lambda name, _: name,
) -> dict[str, Stored]:
    """The model's tensors, fused ones cut. Raises FileError where they are not those of such a decoder.

    spelling   how the file calls a tensor

    A tensor that the computation would not use is refused too: leaving out a bias would change every answer silently.
    """
    whole = _cut(tensors, config)
    if config.tied:
        whole.pop("output.weight", None)
    known = {}
    for wanted, shapes in expected(config):  # one by one: sizes that are wrong fail at the first missing tensor
        name = wanted.removeprefix(_OPTIONAL)
        if name not in whole:
            if name != wanted:
                continue
            raise FileError(
                f"{path}: the weights lack `{spelling(name, config)}`, which a decoder of family {config.family} has.",
                "do its sizes and the weights belong together?",
            )
        if whole[name].shape not in shapes:
            raise FileError(
                f"{path}: `{spelling(name, config)}` has shape {whole[name].shape}, but the sizes make it {shapes[0]}.",
                "do its sizes and the weights belong together?",
            )
        known[name] = whole[name]
    surplus = sorted(whole.keys() - known.keys())
    if surplus:
        raise FileError(
            f"{path}: a decoder of family {config.family} has no `{spelling(surplus[0], config)}` ({len(surplus)} "
            "such tensors in all).",
            "leaving it out would change the answers; Transformers may run it.",
        )
    return known


def expected(config: Config) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    """The name and the allowed shapes of each tensor; those that may be missing begin with ?."""
    d, queries, keys = config.d_model, config.heads * config.d_k, config.kv_heads * config.d_k
    yield "token_embd.weight", ((config.vocabulary, d),)
    if config.ropes[0] is None:
        yield "position_embd.weight", ((config.positions, d),)
    yield from _vector("output_norm", d)
    if not config.tied:
        yield "output.weight", ((config.vocabulary, d),)
    yield "?output.bias", ((config.vocabulary,),)
    behind = config.family == "olmo2"  # its norms stand behind attention and MLP alone
    for layer in range(config.layers):
        name = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            yield from _vector(("?" if behind else "") + name + norm, d)
        for norm in ("post_attention_norm", "post_ffw_norm"):
            yield from _vector(f"?{name}{norm}", d)
        for norm, width in (("attn_q_norm", queries), ("attn_k_norm", keys)):
            yield f"?{name}{norm}.weight", ((config.d_k,), (width,))
        matrices = {"attn_q": (queries, d), "attn_k": (keys, d), "attn_v": (keys, d), "attn_output": (d, queries)}
        matrices |= {"ffn_up": (config.d_mlp, d), "ffn_down": (d, config.d_mlp)}
        if config.gated:
            matrices["ffn_gate"] = config.d_mlp, d
        for part, shape in matrices.items():
            yield f"{name}{part}.weight", (shape,)
            yield f"?{name}{part}.bias", (shape[:1],)


def _vector(name: str, width: int) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    yield f"{name}.weight", ((width,),)
    yield f"?{name.removeprefix(_OPTIONAL)}.bias", ((width,),)


def _cut(tensors: dict[str, Stored], config: Config) -> dict[str, Stored]:
    """The tensors with fused projections as their parts: q, k, v, and an MLP's gate and what it gates."""
    keys = config.kv_heads * config.d_k
    parts = {
        "attn_qkv": {"attn_q": config.heads * config.d_k, "attn_k": keys, "attn_v": keys},
        "ffn_up": {"ffn_gate": config.d_mlp, "ffn_up": config.d_mlp},
    }
    result: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.rpartition("blk.")[2].partition(".")
        part, _, kind = rest.rpartition(".")
        sizes = parts.get(part, {}) if name.startswith("blk.") else {}
        if not sizes or tensor.shape[0] != sum(sizes.values()):
            result[name] = tensor
            continue
        start = 0
        for each, size in sizes.items():
            result[f"blk.{layer}.{each}.{kind}"] = tensor.part(start, start + size)
            start += size
    return result


def check_memory(path: Path, tensors: dict[str, Stored]) -> None:
    """Raise FileError where not even the largest layer fits into the free memory in float32."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        layer = name.split(".")[1] if name.startswith("blk.") else name
        sizes[layer] = sizes.get(layer, 0) + 4 * prod(tensor.shape) * name.startswith("blk.")
    check_room_for_file(path, max(sizes.values(), default=0), "one of its layers in float32")
