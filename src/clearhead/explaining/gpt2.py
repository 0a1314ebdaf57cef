"""A decoder in the GPT-2 checkpoint layout, run in NumPy through this library's own attention.

A directory holds config.json, model.safetensors (or shards with model.safetensors.index.json) and tokenizer.json (or
vocab.json and merges.txt). Weights load from safetensors only, never from a pickle. The layout is that of Radford et
al. 2019 as Hugging Face stores it: linear weights are (d_in, d_out).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.core.array_files import safetensors
from clearhead.core.axes import Array
from clearhead.core.files import json_of, read_bytes
from clearhead.core.room import check_room_for_file
from clearhead.core.rule_values import whole_number
from clearhead.errors import FileError, ShapeError
from clearhead.explaining import editing
from clearhead.explaining.functions import ACTIVATIONS, normalise
from clearhead.explaining.model import Each, ForwardPass, LayerRun, Token, token_text, too_long

SHIPPED = "rhymes"
_MOST_TOKENIZER = 2**28  # bytes; the largest vocabularies take some 40 million


class GPT2Config(NamedTuple):
    """The numbers of config.json that the computation needs."""

    layers: int
    heads: int
    d_model: int
    d_mlp: int
    positions: int
    vocabulary: int
    epsilon: float
    activation: str
    tied: bool
    scaled: bool
    scaled_by_layer: bool


@dataclass(frozen=True, eq=False, slots=True)
class Model:
    """A loaded checkpoint: its name, config, float32 weights by name, and tokenizer."""

    name: str
    config: GPT2Config
    weights: Mapping[str, Array]
    tokenizer: Any

    def tokens(self, text: str) -> list[Token]:
        """Cut `text` into tokens. Raises ShapeError when it is empty or longer than the model's positions."""
        tokens = self._tokens(self.tokenizer.encode(text))
        if len(tokens) > self.config.positions:
            raise too_long(len(tokens), self.config.positions)
        return tokens

    def windows(self, text: str) -> list[list[Token]]:
        """The tokens of a text of any length, in windows of at most the model's positions that do not overlap.

        `start` and `stop` of a token count from the start of the whole text. Raises ShapeError when it is empty.
        """
        self.tokenizer.enable_truncation(self.config.positions)
        try:
            encoded = self.tokenizer.encode(text)
        finally:
            self.tokenizer.no_truncation()
        return [self._tokens(part) for part in (encoded, *encoded.overflowing)]

    def _tokens(self, encoded: Any) -> list[Token]:
        if not encoded.ids:
            raise ShapeError(
                "the text is empty: there is no token to explain.", 'clearhead explain "humpty dumpty sat on"'
            )
        top = max(encoded.ids)
        if top >= self.config.vocabulary:
            values = {"token": top, "vocabulary": self.config.vocabulary}
            raise FileError(
                "the tokenizer gives id {token} but the model's vocabulary has {vocabulary} tokens.", **values
            )
        return [Token(i, self.text(i), *span) for i, span in zip(encoded.ids, encoded.offsets, strict=True)]

    def text(self, token: int) -> str:
        """A token's own text; bytes that are no whole character in hexadecimal, ⟨e7⟩."""
        decoded: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return token_text(decoded, self.tokenizer.id_to_token(token))

    def projections(self, layer: int) -> dict[str, Array]:
        """W^Q, W^K, W^V, W^O and their biases of one layer, each (d_in, d_out)."""
        names = {f"{kind}_{p}": f"h.{layer}.attn.{kind}_{p}" for p in "qkv" for kind in "wb"}
        names |= {"w_o": f"h.{layer}.attn.c_proj.weight", "b_o": f"h.{layer}.attn.c_proj.bias"}
        return {name: self.weights[key] for name, key in names.items()}

    def generate(self, ids: list[int], count: int) -> list[int]:
        """The ids that the model puts after these, each the likeliest (greedy). Raises ShapeError for too many.

        Keys and values are kept: each step takes one token through the layers, O(d_model² + tokens·d_k for each head)
        and layer.
        """
        if len(ids) + count > self.config.positions:
            raise too_long(len(ids) + count, self.config.positions)
        w = self.weights
        past: list[tuple[Array, Array] | None] = [None] * self.config.layers
        made: list[int] = []
        new = ids
        for _ in range(count):
            first = len(ids) + len(made) - len(new)
            hidden = w["wte.weight"][new] + w["wpe.weight"][first : first + len(new)]
            for number in range(self.config.layers):
                run, hidden = self.layer(number, hidden, past=past[number])
                past[number] = run.k, run.v
            made.append(int(np.argmax(self.final(hidden[-1:]) @ w["lm_head.weight"].T)))
            new = made[-1:]
        return made

    def run(self, ids: list[int], each: Each = iter, edits: Sequence[Edit] = ()) -> ForwardPass:
        """The forward pass in float32: (tokens, vocabulary) logits, and each attention layer's inputs and outputs.

        `each` iterates over the layers, such as a progress bar; `edits` of attention have positions, no words.
        """
        hidden = [self.weights["wte.weight"][ids] + self.weights["wpe.weight"][: len(ids)]]
        runs = []
        for number in each(range(self.config.layers)):
            run, after = self.layer(number, hidden[-1], edits)
            runs.append(run)
            hidden.append(after)
        return ForwardPass(runs, self.final(hidden[-1]) @ self.weights["lm_head.weight"].T, hidden, tuple(edits))

    def layer(
        self, number: int, hidden: Array, edits: Sequence[Edit] = (), past: tuple[Array, Array] | None = None
    ) -> tuple[LayerRun, Array]:
        """One layer: its attention, and the residual stream after it, (tokens, d_model).

        hidden   (tokens, d_model), the residual stream before it: of the last tokens where `past` is given
        past     the keys and values of the tokens before these, each (heads, tokens before, d_k)
        """
        w, config, name = self.weights, self.config, f"h.{number}."
        x = normalise(hidden, w[name + "ln_1.weight"], w[name + "ln_1.bias"], config.epsilon)
        q, k, v = (split(x @ w[name + f"attn.w_{p}"] + w[name + f"attn.b_{p}"], config.heads) for p in "qkv")
        rules: dict[str, Any] = {"causal": True, **_scaled(config, number)}
        if past is not None:
            rules["query_offset"] = past[0].shape[1]
            k, v = (np.concatenate([old, new], axis=1) for old, new in zip(past, (k, v), strict=True))
        acting = editing.acting(edits, number, config.layers)
        call = editing.call(q, k, v, rules, acting, number)
        heads = call.output()[0]
        output = join(heads) @ w[name + "attn.c_proj.weight"] + w[name + "attn.c_proj.bias"]
        factors = editing.factors(acting, config.heads)
        run = LayerRun(x, q, k, v, heads, output, call.whole_rules(), normalised=True, factors=factors)
        middle = hidden + output
        inner = ACTIVATIONS[config.activation].value(self.before_activation(number, middle))
        return run, middle + inner @ w[name + "mlp.c_proj.weight"] + w[name + "mlp.c_proj.bias"]

    def before_activation(self, number: int, middle: Array) -> Array:
        """What the activation function of a layer's MLP is given, (tokens, d_mlp).

        middle   (tokens, d_model), the residual stream after the layer's attention
        """
        w, name = self.weights, f"h.{number}."
        y = normalise(middle, w[name + "ln_2.weight"], w[name + "ln_2.bias"], self.config.epsilon)
        return y @ w[name + "mlp.c_fc.weight"] + w[name + "mlp.c_fc.bias"]

    def final(self, hidden: Array) -> Array:
        """The last layer norm, (tokens, d_model), which the logits are products of."""
        return normalise(hidden, self.weights["ln_f.weight"], self.weights["ln_f.bias"], self.config.epsilon)


def load(directory: str | Path | None = None) -> Model:
    """Load a GPT-2-layout checkpoint, or the one that ships with the package.

    Raises FileError when a file is missing, malformed, or does not hold a GPT-2: the sentence says which and why.
    """
    if directory is not None:
        return _load(Path(directory), str(directory))
    with as_file(files("clearhead") / "models" / SHIPPED) as place:
        return _load(place, SHIPPED)


def _load(place: Path, name: str) -> Model:
    if not os.path.isdir(place):
        raise FileError(
            "{place} is not a directory.",
            "a GPT-2 directory holds config.json, model.safetensors, tokenizer.json; with PyTorch and Transformers the "
            "directory of any model that they load will do.",
            place=place,
        )
    config = _config(place / "config.json")
    stored = _stored(place)
    check_room_for_file(place, sum(4 * array.size for array in stored.values()), "its weights in float32")
    prefix = "transformer." if any(key.startswith("transformer.") for key in stored) else ""
    weights: dict[str, Array] = {}
    for key, shape in _expected(config):  # one by one: a config with wrong sizes fails at the first missing array
        source = key if key == "lm_head.weight" else prefix + key
        if source not in stored:
            values: dict[str, object] = {"source": source, "name": place.name}
            raise FileError(
                "{name}: the weights lack `{source}`, which a GPT-2 has.", "is this a GPT-2 checkpoint?", **values
            )
        if stored[source].shape != shape:
            values = {"source": source, "stored": stored[source].shape, "shape": shape, "name": place.name}
            raise FileError(
                "{name}: `{source}` has shape {stored}, but config.json makes it {shape}.",
                "do config.json and the weights belong together?",
                **values,
            )
        weights[key] = stored[source].astype(np.float32)
    weights = separated(weights, config.layers)
    if config.tied:
        weights["lm_head.weight"] = weights["wte.weight"]
    return Model(name, config, weights, _tokenizer(place))


def separated(weights: Mapping[str, Array], layers: int) -> dict[str, Array]:
    """The weights with w_q, w_k, w_v and their biases in place of c_attn, which holds them side by side."""
    made = dict(weights)
    for layer in range(layers):
        for part, kind in (("weight", "w"), ("bias", "b")):
            joined = made.pop(f"h.{layer}.attn.c_attn.{part}")
            for p, piece in zip("qkv", np.split(joined, 3, axis=-1), strict=True):
                made[f"h.{layer}.attn.{kind}_{p}"] = np.ascontiguousarray(piece)
    return made


def _config(path: Path) -> GPT2Config:
    data = json_of(path)
    kind = data.get("model_type")
    if kind != "gpt2":
        values = {"path": path, "kind": kind}
        raise FileError(
            "{path} is for model_type {kind!r}, not 'gpt2'.",
            "only the GPT-2 layout loads here; its config says model_type gpt2.",
            **values,
        )
    sizes = {}
    for key in ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size"):
        sizes[key] = whole_number(f"{path}: {key}", data.get(key), error=FileError)
    if sizes["n_embd"] % sizes["n_head"]:
        values = {"width": sizes["n_embd"], "heads": sizes["n_head"], "path": path}
        raise FileError("{path}: n_embd {width} is not a multiple of n_head {heads}.", **values)
    activation = data.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        values = {"activation": activation, "known": ", ".join(ACTIVATIONS), "path": path}
        raise FileError("{path}: activation_function {activation!r} is unknown: expected one of {known}.", **values)
    if data.get("add_cross_attention"):
        raise FileError("{path}: add_cross_attention is set, and only decoders without it load here.", path=path)
    if data.get("n_inner") is not None:
        sizes["n_inner"] = whole_number(f"{path}: n_inner", data["n_inner"], error=FileError)
    epsilon = data.get("layer_norm_epsilon", 1e-5)
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not 0 <= epsilon <= 1:
        raise FileError(
            "{path}: layer_norm_epsilon is {epsilon!r}: expected a number from 0 to 1.", epsilon=epsilon, path=path
        )
    return config_of(data | sizes)


def config_of(data: Mapping[str, Any]) -> GPT2Config:
    """The numbers of a config.json; those that it leaves out are GPT-2's."""
    return GPT2Config(
        layers=data["n_layer"],
        heads=data["n_head"],
        d_model=data["n_embd"],
        d_mlp=4 * data["n_embd"] if data.get("n_inner") is None else data["n_inner"],
        positions=data["n_positions"],
        vocabulary=data["vocab_size"],
        epsilon=float(data.get("layer_norm_epsilon", 1e-5)),
        activation=data.get("activation_function", "gelu_new"),
        tied=bool(data.get("tie_word_embeddings", True)),
        scaled=bool(data.get("scale_attn_weights", True)),
        scaled_by_layer=bool(data.get("scale_attn_by_inverse_layer_idx", False)),
    )


def _expected(config: GPT2Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of each array that a GPT-2 of these sizes has."""
    d, inner = config.d_model, config.d_mlp
    yield "wte.weight", (config.vocabulary, d)
    yield "wpe.weight", (config.positions, d)
    yield from (("ln_f.weight", (d,)), ("ln_f.bias", (d,)))
    if not config.tied:
        yield "lm_head.weight", (config.vocabulary, d)
    for layer in range(config.layers):
        linear = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, inner), "mlp.c_proj": (inner, d)}
        for name, shape in linear.items():
            yield from ((f"h.{layer}.{name}.weight", shape), (f"h.{layer}.{name}.bias", shape[1:]))
        for name in ("ln_1", "ln_2"):
            yield from ((f"h.{layer}.{name}.weight", (d,)), (f"h.{layer}.{name}.bias", (d,)))


def _stored(place: Path) -> dict[str, Array]:
    merged: dict[str, Array] = {}
    for path in weight_files(place):
        merged |= safetensors(path)[0]
    return merged


def weight_files(place: Path) -> list[Path]:
    """A checkpoint's safetensors files, one or its shards. Raises FileError where there are none."""
    single, index = place / "model.safetensors", place / "model.safetensors.index.json"
    if os.path.isfile(single):
        return [single]
    if os.path.isfile(index):
        shards = json_of(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise FileError("{index} has no weight_map of tensor names to files.", index=index)
        return [place / Path(shard).name for shard in sorted(set(shards.values()))]
    pickles = [p.name for p in place.glob("*.bin")] + [p.name for p in place.glob("*.pt")]
    hint = "{pickle} is a pickle, which can run code: convert it to safetensors." if pickles else ""
    raise FileError("{place} has no model.safetensors.", hint, place=place, pickle="".join(pickles[:1]))


def _tokenizer(place: Path) -> Any:
    """The tokenizer, set to neither pad nor truncate, whatever its tokenizer.json asks for."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    whole, vocabulary, merges = place / "tokenizer.json", place / "vocab.json", place / "merges.txt"
    try:
        if os.path.isfile(whole):
            tokenizer = Tokenizer.from_buffer(read_bytes(whole, _MOST_TOKENIZER))
        elif os.path.isfile(vocabulary) and os.path.isfile(merges):
            tokenizer = ByteLevelBPETokenizer(str(vocabulary), str(merges))
        else:
            raise FileError("{place} has no tokenizer.json, and no vocab.json with merges.txt.", place=place)
    except FileError:
        raise
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise FileError("{place}: the tokenizer cannot be read: {reason}.", reason=str(error), place=place) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _scaled(config: GPT2Config, layer: int) -> dict[str, float]:
    """The rule `scale`, where the config asks for another one than 1/√d_k."""
    base = (config.d_model // config.heads) ** -0.5 if config.scaled else 1.0
    scale = base / (layer + 1) if config.scaled_by_layer else base
    return {} if config.scaled and (layer == 0 or not config.scaled_by_layer) else {"scale": scale}


def split(x: Array, heads: int) -> Array:
    """(tokens, heads·d_k) to (heads, tokens, d_k)."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def join(x: Array) -> Array:
    """(heads, tokens, d_k) to (tokens, heads·d_k)."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)
