"""A model's weights as they are stored, memory-mapped and packed, and which of them a decoder has.

The compiled kernel multiplies by them as they lie in the file. Where it cannot, NumPy multiplies by some rows at a time
in float32, so that nothing is unpacked for longer than a product. Missing, strange and surplus weights are refused,
fused ones are cut.

Names are those of GGUF files: `token_embd.weight`, `blk.3.attn_q.weight`, … Linear weights are (d_out, d_in).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from clearhead.core.array_files import DTYPES
from clearhead.core.axes import Array
from clearhead.engines import native
from clearhead.errors import FileError, MissingExtraError
from clearhead.models.families import Config

_ROWS = 2**22  # numbers that NumPy unpacks at a time


@dataclass(frozen=True, eq=False, slots=True)
class Stored:
    """One tensor: its numbers, or the bytes of its blocks where it is packed.

    kind         the dtype as safetensors writes it (F32, BF16, …), or GGUF's name of the packing (Q4_K, …)
    data         (rows, …) numbers, or (rows, bytes of a row) as uint8
    transposed   is it stored as (d_in, d_out)?
    order        which rows make the tensor, in this order; None: all as they are
    plus         what is added to each number: 1 where a norm keeps its weight less 1
    """

    kind: str
    shape: tuple[int, ...]
    data: Array
    transposed: bool = False
    order: Array | None = None
    plus: float = 0.0

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    def rows(self, chosen: Any = slice(None), dtype: type[np.floating[Any]] = np.float32) -> Array:
        """These rows of the tensor in a dtype; a view of the file where it is that already."""
        if self.order is not None:
            chosen = self.order[chosen]
        part = self.data.T[chosen] if self.transposed else self.data[chosen]
        if self.kind == "BF16":  # the upper half of a float32
            numbers = (part.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
        elif self.kind in DTYPES:
            numbers = part
        else:  # as one row: of many, gguf takes 16 at a time, which is slow
            quants, kinds = packings()
            row = quants.dequantize(np.ascontiguousarray(part).reshape(1, -1), kinds[self.kind])
            numbers = row.reshape(quants.quant_shape_from_byte_shape(part.shape, kinds[self.kind]))
        numbers = np.require(numbers, dtype, "A")  # a file may store numbers at odd places
        return numbers + dtype(self.plus) if self.plus else numbers

    def part(self, start: int, stop: int) -> "Stored":
        """Some of its rows as a tensor of its own, such as the queries of a fused projection."""
        data, order = self.data, self.order
        if order is not None:
            order = order[start:stop]
        else:
            data = data[:, start:stop] if self.transposed else data[start:stop]
        return Stored(self.kind, (stop - start, *self.shape[1:]), data, self.transposed, order, self.plus)

    def product(self, x: Array, *, back: bool = False) -> Array:
        """x·Wᵀ for x (…, d_in); where `back`, x·W for x (…, d_out). W is this tensor, (d_out, d_in)."""
        rows = x.reshape(-1, x.shape[-1])
        if x.dtype == np.float32 and self.kind in native.PACKINGS and not native.missing():
            turned = back != self.transposed  # what is stored as (d_in, d_out) is its transpose
            columns = self.shape[0 if self.transposed else 1]
            made = native.multiply(rows, self.data, self.kind, columns, self.order, back=turned)
        else:
            made = np.zeros((len(rows), self.shape[1 if back else 0]), x.dtype)
            step = max(1, _ROWS // self.shape[1])
            for start in range(0, self.shape[0], step):
                some = slice(start, start + step)
                w = self.rows(some, x.dtype.type)
                if back:
                    made += rows[:, some] @ w
                else:
                    made[:, some] = rows @ w.T
        return made.reshape(*x.shape[:-1], -1)


def packings() -> tuple[Any, Any]:
    """The module that unpacks GGUF's types, and the types by name. Raises MissingExtraError where gguf is missing."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise MissingExtraError(
            "GGUF files need the package gguf, which is not installed.", 'pip install "clearhead[gguf]"'
        ) from error
    return quants, GGMLQuantizationType


@dataclass(frozen=True, eq=False, slots=True)
class Weights:
    """The tensors of a model by name, in the dtype in which it runs."""

    stored: Mapping[str, Stored]
    dtype: type[np.floating[Any]] = np.float32

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __getitem__(self, name: str) -> Array:
        """A tensor, (d_out, d_in) or (d,), unpacked."""
        return self.stored[name].rows(dtype=self.dtype)

    def get(self, name: str) -> Array | None:
        """The tensor, or None where the model has none of that name."""
        return self[name] if name in self.stored else None

    def rows(self, name: str, chosen: Sequence[int] | Array) -> Array:
        """Some rows of a matrix; only they are unpacked."""
        return self.stored[name].rows(np.asarray(chosen, np.intp), self.dtype)

    def product(self, x: Array, name: str, *, back: bool = False) -> Array:
        """x·Wᵀ for x (…, d_in); where `back`, x·W for x (…, d_out), which takes a derivative back through x·Wᵀ."""
        return self.stored[name].product(x, back=back)


_OPTIONAL = "?"  # before a name: the model may lack it


def checked(path: object, tensors: dict[str, Stored], config: Config) -> dict[str, Stored]:
    """The model's tensors, fused ones cut. Raises FileError where they are not those of such a decoder.

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
                f"{path}: the weights lack what GGUF calls `{name}`, which a decoder of family {config.family} has.",
                "do its sizes and the weights belong together?",
            )
        if whole[name].shape not in shapes:
            raise FileError(
                f"{path}: `{name}` has shape {whole[name].shape}, but the sizes make it {shapes[0]}.",
                "do its sizes and the weights belong together?",
            )
        known[name] = whole[name]
    surplus = sorted(whole.keys() - known.keys())
    if surplus:
        raise FileError(
            f"{path}: a decoder of family {config.family} has no `{surplus[0]}` ({len(surplus)} such tensors in all).",
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
        layer, _, rest = name.removeprefix("blk.").partition(".")
        part, _, kind = rest.rpartition(".")
        sizes, start = parts.get(part, {}), 0
        if tensor.shape[0] != sum(sizes.values()):
            sizes, result[name] = {}, tensor
        for each, size in sizes.items():
            result[f"blk.{layer}.{each}.{kind}"] = tensor.part(start, start + size)
            start += size
    return result
