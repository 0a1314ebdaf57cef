"""A decoder with its tokenizer and name, as `explain` takes it. It runs in NumPy, without PyTorch.

The attention and stream of a long text would take more memory than the model. Its run keeps the keys and values, from
which requested rows are computed again, and the stream before every sixth layer.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, cast

import numpy as np

from clearhead.changing.applying import OTHER_RUN, check_layers, placed
from clearhead.changing.edits import Edit
from clearhead.core.axes import Array
from clearhead.core.files import check_waits, json_of
from clearhead.core.rule_values import whole_number
from clearhead.errors import FileError, RuleError, SelectionError
from clearhead.models import folder, gguf, tensors, tokens
from clearhead.models.decoder import Decoder, OnDemand, choices, is_long, may_act, of_logits, stream
from clearhead.models.families import Config
from clearhead.models.protocol import Attended, Each, ForwardPass, LayerRun, Slope, Variant, ids_of, in_short
from clearhead.models.tokenizer import Tokenizer
from clearhead.models.variants import Kept, again, hidden_of, through
from clearhead.models.weights import Stored, Weights
from clearhead.ops.matrix import AttentionMatrix
from clearhead.watching.layer import Layer
from clearhead.watching.pieces import pieces_of
from clearhead.watching.places import Text
from clearhead.watching.seen import Seen
from clearhead.watching.watch import Wish

SHIPPED = "rhymes"
_LOGITS = 2**21  # logits that are computed at a time
Placed = Callable[[Sequence[int]], tuple[Edit, ...]]  # a text's edits in a block of `ch.change`, by position

# For each decoder, the open blocks of `ch.watch` and `ch.change`, outermost first, and what each does with a run.
blocks: dict[Decoder, list[tuple[Placed | None, Callable[[ForwardPass], None]]]] = {}


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Model:
    """A decoder, its name and its tokenizer."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer

    __repr__ = in_short

    @property
    def config(self) -> Config:
        """The decoder's sizes and choices."""
        return self.decoder.config

    def projections(self, layer: int) -> dict[str, Array]:
        """Return W^Q, W^K, W^V, W^O and their biases of one layer, matrices as (d_in, d_out).

        Empty if queries and keys are not x·W + b, because they are normed or rotated.
        """
        weights, name = self.decoder.weights, f"blk.{layer}.attn_"
        turned = self.config.ropes[layer] is not None or f"{name}q_norm.weight" in weights
        if turned or any(f"{name}{part}.bias" not in weights for part in ("q", "k", "v", "output")):
            return {}
        result = {f"w_{part[0]}": weights[f"{name}{part}.weight"].T for part in ("q", "k", "v", "output")}
        return result | {f"b_{part[0]}": weights[f"{name}{part}.bias"] for part in ("q", "k", "v", "output")}

    def generate(
        self, ids: list[int] | str, count: int, each: Each = iter, *, ends: bool = False, run: ForwardPass | None = None
    ) -> list[int]:
        """Continue a text or ids by the likeliest next token each time (greedy); `each` iterates over the new tokens.

        ends   stop before a token that ends a text; False: return `count` ids in any case
        run    a run of the first ids, whose keys and values are used again
        Raises ShapeError for more tokens than positions, RuleError for ids or a count that cannot be.
        """
        self._check_unchanged()
        ids, count = ids_of(self, ids), whole_number("count", count, 0)
        self.tokenizer.fits(len(ids), count)
        made, new = list[int](), list(ids)
        kept, start = self.decoder.room(len(ids) + count), 0
        if run is not None:
            start = min(len(run.ids), len(ids) - 1)
            for (keys, values, _), (k, v) in zip(kept, run.past, strict=True):
                keys[:, :start], values[:, :start] = k[:, :start], v[:, :start]
            new = new[start:]
        for _ in each(range(count)):
            logits, start = self.decoder.extended(new, start, kept), start + len(new)
            new = [int(np.argmax(logits))]
            if ends and new[0] in self.tokenizer.ends:
                break
            made += new
        return made

    def run(self, ids: list[int] | str, each: Each = iter) -> ForwardPass:
        """Run a text or its ids in float32: return each token's logits, each layer's attention, the residual stream.

        `each` iterates over the layers, such as a progress bar. Open blocks of `ch.change` edit the model's attention,
        those of `ch.watch` record the run.
        """
        decoder, config, ids = self.decoder, self.config, ids_of(self, ids)
        inside = blocks.get(decoder, [])
        edits = [edit for in_text, _ in inside if in_text is not None for edit in in_text(ids)]
        if any(edit.seen is not None for edit in edits) and any(in_text is None for in_text, _ in inside):
            raise RuleError(*OTHER_RUN)
        first, inputs, layers = decoder.embedded(ids), decoder.inputs(ids), config.layers
        turns = decoder.turns(np.arange(len(ids)))
        long, kept, past = is_long(first.size * layers), list[LayerRun](), list[tuple[Array, Array]]()

        def step(number: int, hidden: Array) -> Array:
            layer = decoder.layer(number, hidden, turns[number], past, edits)
            if number == len(past):  # the first time
                past.append((layer.k, layer.v))
                if not long:
                    kept.append(layer)
            return decoder.after(number, hidden, layer.output, inputs[:, number])

        hidden = stream(step, first, layers, each)
        made = ForwardPass(kept, Logits(decoder, hidden[-1]), hidden, tuple(ids), past)
        if long:
            made = _of_long_text(decoder, made, edits, inputs)
        for _, ran in inside:
            ran(made)
        return made

    def differentiated(
        self,
        ids: list[int],
        variants: Sequence[Variant],
        rows: range,
        slope: Slope,
        run: ForwardPass | None = None,
        each: Each = iter,
    ) -> Iterator[tuple[int, int, Attended]]:
        """Run variants of a text, then differentiate a function of the logits of `rows`; yields the last layer first.

        variants   all have gates, or none has
        slope   maps one variant's logits of these rows, (rows, vocabulary), to the function's derivative by them
        run     a run of the text, if it is the only variant: it is not repeated, and results are of the tokens from
                rows.start on, whose derivatives do not pass through earlier tokens
        each    iterates over the layers, forward and back
        """
        self._check_unchanged()
        decoder, first, kept = self.decoder, 0 if run is None else rows.start, Kept()
        hidden = (
            hidden_of(decoder, ids, variants, rows, kept, each) if run is None else [x[None] for x in run.stream(first)]
        )
        past = [] if run is None else [(k[:, :first], v[:, :first]) for k, v in run.past]
        step = max(1, _LOGITS // (len(rows) * self.config.vocabulary))
        some = (hidden[-1][start : start + step] for start in range(0, len(variants), step))
        by_last = [of_logits(decoder, last, np.stack([*map(slope, decoder.logits(last))])) for last in some]
        yield from through(decoder, ids[first:], hidden, variants, np.concatenate(by_last), past, each, kept)

    def again(self, run: ForwardPass, variants: Sequence[Variant], rows: range, each: Each = iter) -> Iterator[Array]:
        """Run variants of a run, and yield each one's logits in some rows, (rows, vocabulary); `each` takes layers."""
        self._check_unchanged()
        lasts = list(again(self.decoder, run, variants, rows, each))
        step = max(1, _LOGITS // (len(rows) * self.config.vocabulary))
        for start in range(0, len(lasts), step):
            yield from self.decoder.logits(np.stack(lasts[start : start + step]))

    def _check_unchanged(self) -> None:
        """Raise RuleError inside a block of `ch.change`, which edits `run` and no other method."""
        if any(in_text is not None for in_text, _ in blocks.get(self.decoder, ())):
            raise RuleError(
                "inside ch.change this model computes model.run(text) alone.",
                "call model.run(text) once for each new token.",
            )


def _of_long_text(decoder: Decoder, run: ForwardPass, edits: Sequence[Edit], inputs: Array) -> ForwardPass:
    """Return the run with layers that are computed when they are read; the latest one is kept."""

    @lru_cache(maxsize=1)
    def from_row(number: int, row: int) -> LayerRun:
        return of_rows(number, (late(row) if row else run.hidden)[number], row)

    @lru_cache(maxsize=1)
    def late(row: int) -> list[Array]:
        made = [run.hidden[0][row:]]
        for number in range(len(run.past)):
            made.append(decoder.after(number, made[-1], of_rows(number, made[-1], row).output, inputs[row:, number]))
        return made

    def of_rows(number: int, hidden: Array, row: int) -> LayerRun:
        k, v = run.past[number]
        turns = decoder.turns(np.arange(row, k.shape[1]))[number]
        shared = {decoder.config.sizes[number].source: (k[:, row:], v[:, row:])}
        return decoder.layer(number, hidden, turns, shared, edits, (k[:, :row], v[:, :row]) if row else None)

    made = replace(run, layers=OnDemand(len(run.past), lambda number: from_row(number, 0)))
    if any(edit.to == "mean" for edit in edits):  # a mean over rows needs all of them
        return made
    return replace(made, from_row=from_row, late=late)


@dataclass(frozen=True, eq=False, slots=True)
class Logits:
    """The logits of every token of a run, (tokens, vocabulary), computed when they are read.

    For a long text, all of them at once would take more memory than the model.
    """

    decoder: Decoder
    hidden: Array

    def __len__(self) -> int:
        return len(self.hidden)

    def __getitem__(self, place: Any) -> Array:
        rows, *chosen = place if isinstance(place, tuple) else (place,)
        logits = self.decoder.logits(self.hidden[rows])
        return logits[..., *chosen] if chosen else logits

    def __iter__(self) -> Iterator[Array]:
        step = max(1, 2**24 // self.decoder.config.vocabulary)
        for start in range(0, len(self.hidden), step):
            yield from self[start : start + step]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return np.asarray(self[:], dtype)


# ── `ch.watch` and `ch.change`: inside a block, `model.run(text)` is recorded or edited ──


@contextmanager
def watched(model: Any, wish: Wish) -> Iterator[Seen]:
    """Record the layers of the model's one run inside the block, as `ch.watch` describes.

    model   a `models.model.Model`
    """
    if wish.causes:
        raise RuleError(
            "causes=True needs PyTorch's derivatives, and this decoder runs without PyTorch.",
            "ch.explain(text, model) shows what made the answer.",
        )
    known = [name for number in range(model.config.layers) for name in choices(number, model.config.layers)]
    missing = [layer for layer in wish.layers or () if str(layer) not in known]
    if missing:
        raise SelectionError(f"layers: there is no {missing[0]!r} in {model.name}.")
    seen = Seen({}, model=model.name)

    def ran(run: ForwardPass) -> None:
        if seen.parts:
            raise RuleError("a block of ch.watch records one text, not two.", "open another `with ch.watch(…)`.")
        decode = wish.tokenizer and wish.tokenizer.decode
        seen.tokens = [[decode([i]) if decode else model.tokenizer.text(i) for i in run.ids]]
        for number, layer in enumerate(run.layers):
            if wish.layers is None or choices(number, len(run.layers)) & set(map(str, wish.layers)):
                seen.parts[str(number)] = _layer(number, layer, wish)

    with _inside(model, None, ran):
        yield seen


@contextmanager
def changed(model: Any, edits: tuple[Edit, ...], tokenizer: Any) -> Iterator[None]:
    """Edit the model's runs inside the block, as `ch.change` describes."""
    count = model.config.layers
    check_layers(edits, [choices(each, count) for each in range(count)], model.name, f"layers are 0 to {count - 1}.")
    decode = model.tokenizer.decoded if tokenizer is None else tokenizer.decode
    texts, acted = list[tuple[Edit, ...]](), set[int]()  # the edits by position in each text; places in `edits`

    def in_text(ids: Sequence[int]) -> tuple[Edit, ...]:
        texts.append(placed(edits, Text(len(ids), [pieces_of(list(ids), decode)])))
        return texts[-1]

    def ran(run: ForwardPass) -> None:
        acted.update(place for place, edit in enumerate(texts[-1]) if place not in acted and may_act(edit, run.layers))

    with _inside(model, in_text, ran):
        yield
    idle = [edit for place, edit in enumerate(edits) if place not in acted]
    if idle and not texts:
        raise RuleError(f"{idle[0]} never acted: {model.name} did not run inside the block.", "model.run(text)")
    if idle:
        raise RuleError(
            f"{idle[0]} never acted: none of its queries sees any of its keys.",
            "in causal attention a query sees only itself and what comes before it.",
        )


@contextmanager
def _inside(model: Any, in_text: Placed | None, ran: Callable[[ForwardPass], None]) -> Iterator[None]:
    here, block = blocks.setdefault(model.decoder, []), (in_text, ran)
    here.append(block)
    try:
        yield
    finally:
        here.remove(block)
        if not here:
            del blocks[model.decoder]


def _layer(number: int, run: LayerRun, wish: Wish) -> Layer:
    q, k, v = (x[None] for x in (run.q, run.k, run.v))
    seen = AttentionMatrix(q, k, **run.rules).observe(**wish.statistics)
    return Layer(str(number), f"blk.{number}", seen, run.rules, q, k, v)


def load(place: str | os.PathLike[str] | None = None, name: str = "") -> Model:
    """Load a model from a GGUF file or a folder, or, once, the one that ships with the package.

    Raises FileError for a file that is missing, malformed, or of a decoder that does not run here.
    """
    if place is None:
        return _shipped()
    place, name = Path(place), name or str(place)
    file = gguf.read(place) if os.path.isfile(place) else None
    config, stored = weights_of(place, file)
    if file is None:
        encoder = folder.tokenizer_of(place)
        chat = folder.chat_of(place, encoder)
    else:
        encoder, chat = tokens.tokenizer_of(file, config.vocabulary), tokens.chat_of(file)
    texts = Tokenizer(name, encoder, config.positions, config.vocabulary, *chat)
    return Model(name, Decoder(config, Weights(stored)), texts)


@cache
def _shipped() -> Model:
    with as_file(files("clearhead") / "models" / SHIPPED) as place:
        return load(place, SHIPPED)


def weights_of(place: Path, file: gguf.GGUF | None = None) -> tuple[Config, dict[str, Stored]]:
    """Read and check a decoder's sizes and tensors in a GGUF file or a folder. Raises FileError."""
    if file is not None:
        config = gguf.config_of(file)
        return config, tensors.checked(place, gguf.stored(file, config), config)
    if not os.path.isdir(place):
        raise FileError(
            f"{place} is not a directory.",
            "give a .gguf file, or the folder with config.json, model.safetensors and tokenizer.json.",
        )
    path = place / "config.json"
    folder.check_folder(place)
    check_waits(path)
    config = folder.config_of(path, data := json_of(path))
    stored = folder.stored(place, config, data)
    config = config._replace(tied=config.tied and "output.weight" not in stored)
    return config, tensors.checked(place, stored, config)


def of_arrays(name: str, data: Mapping[str, Any], arrays: Mapping[str, Array]) -> Model:
    """Make a decoder without a tokenizer from a config.json's numbers and float32 arrays named as in safetensors."""
    config = folder.config_of(Path("config.json"), data)
    stored = tensors.renamed({key: ("F32", array) for key, array in arrays.items()}, config)
    return Model(name, Decoder(config, Weights(tensors.checked(name, stored, config))), cast("Tokenizer", None))
