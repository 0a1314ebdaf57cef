"""`ch.watch`: a model's attention observed while it runs inside a block."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.errors import MissingExtraError, RuleError, SelectionError
from clearhead.watching.seen import Seen

if TYPE_CHECKING:
    from clearhead.watching.recording import Recording

CROSS = re.compile(r"cross|encoder_?attn|encdec", re.IGNORECASE)
STACKS = frozenset(
    ("encoder", "decoder", "text_model", "language_model", "vision_model", "vision_tower", "visual", "audio_tower")
)


@contextmanager
def watch(
    model: Any,
    *,
    entropy: bool = False,
    received: bool = False,
    max_logit: bool = False,
    peak: bool = False,
    distance: bool = False,
    top: int | None = None,
    image: tuple[int, int] | None = None,
    layers: Collection[int | str] | None = None,
    heads: Collection[int] | None = None,
    keep: bool = True,
    values: bool = False,
    tokenizer: Any = None,
) -> Iterator[Seen]:
    """Observe every attention of a Transformers model while it runs inside the block; then it is as it was before.

    model      any Transformers model whose attention goes through its AttentionInterface; any float dtype, CPU or GPU
    entropy, received, max_logit, peak, distance, top, image     as in `AttentionMatrix.observe`; logsumexp always is
    layers     which layers to observe, by number or name; None is all. The others cost what attention costs.
    heads      which heads to keep, in every layer; None is all
    keep       keep queries and keys as well, O(tokens), so that `seen.matrix(layer)` has every weight
    values     keep values as well: `seen.layer(i).v`, for what each key brings to the output
    tokenizer  makes texts of the ids in `seen.tokens`; anything with decode(list of ids)

    Gives a Seen: `seen[layer]` is an Observation, `seen.matrix(layer)` an AttentionMatrix. One sequence (or batch of
    them) in a block: the steps of `model.generate` follow one another along the queries. The model's numbers are its
    own but for rounding; queries that see only padding get 0, where eager attention takes the mean of everything.
    In training mode dropout acts on the output as ever, and what is observed are the weights before dropout.
    Masks stay rules (causal, window, padding, segments); `seen.layer(i).note` says where a model's own needs n × m.
    Raises MissingExtraError, DtypeError for what is no such model, RuleError where its attention cannot be watched.

    >>> import torch, transformers, clearhead as ch
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
    >>> model = transformers.GPT2Model(config).eval()
    >>> with torch.no_grad(), ch.watch(model, received=True) as seen:
    ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
    >>> seen.tokens, round(float(seen[0].received.sum()))
    ([[1, 2, 3, 4]], 8)
    """
    try:
        from clearhead.watching import switching
        from clearhead.watching.attending import watchers
    except ImportError as error:
        raise MissingExtraError(
            f"watch needs PyTorch and Transformers: {error}.", "pip install 'clearhead[hf]'"
        ) from error
    switching.check(model)
    asked: dict[str, Any] = {
        "entropy": entropy,
        "received": received,
        "max_logit": max_logit,
        "peak": peak,
        "distance": distance,
    }
    asked |= {"top": top, "image": image, "logsumexp": True}
    watching = _Watching(model, asked, layers, heads, keep=keep, values=values, tokenizer=tokenizer)
    before = switching.switch(model)
    hook = model.register_forward_pre_hook(watching.read_tokens, with_kwargs=True)
    for module in model.modules():
        watchers[module] = watching.attention
    try:
        yield watching.seen
        watching.check_chosen(switching.attentions(model))
    finally:
        hook.remove()
        for module in model.modules():
            watchers.pop(module, None)
        switching.restore(before)
        watching.finish()


class _Watching:
    """What goes on inside the block."""

    def __init__(
        self,
        model: Any,
        asked: dict[str, Any],
        layers: Collection[int | str] | None,
        heads: Collection[int] | None,
        *,
        keep: bool,
        values: bool,
        tokenizer: Any,
    ) -> None:
        self.asked, self.layers, self.keep, self.values, self.tokenizer = asked, layers, keep, values, tokenizer
        self.heads = None if heads is None else _heads(heads)
        self.paths = {module: path for path, module in model.named_modules()}
        inner = [path for path in self.paths.values() if re.search(r"\.\d+\.", path)]
        self.stacked = len({_stack(path) for path in inner}) > 1
        self.crossed = any(CROSS.search(path.split(".")[-1]) for path in inner)
        self.encoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.recordings: dict[Any, Recording | None] = {}
        self.met: set[int | str] = set()
        self.ran = False
        self.parts: dict[str, Recording] = {}
        self.seen = Seen(self.parts, model=type(model).__name__)

    def attention(self, module: Any) -> "tuple[Recording | None, dict[str, Any]]":
        """The recording of the layer that `module` is, and what to ask of it; None where it was not chosen."""
        if module not in self.recordings:
            self.recordings[module] = self._recording(self.paths[module])
        recording = self.recordings[module]
        if recording is None:
            return None, {}
        self.parts[recording.name] = recording
        return recording, self.asked if not recording.calls else {**self.asked, "image": None}

    def _recording(self, path: str) -> "Recording | None":
        from clearhead.watching.recording import Recording

        numbers = re.findall(r"(?:^|\.)(\d+)(?=\.|$)", path)
        cross = bool(CROSS.search(path.split(".")[-1]) or CROSS.search(path.split(".")[-2] if "." in path else ""))
        name = numbers[0] if numbers else path
        if numbers and self.stacked and _stack(path):
            name = f"{_stack(path)}.{name}"
        if numbers and self.crossed:
            name += ".cross" if cross else ".self"
        if any(known is not None and known.name == name for known in self.recordings.values()):
            name = path
        if self.layers is not None:
            wanted = {one for one in self.layers if one in (name, path) or str(one) == (numbers or [None])[0]}
            self.met |= wanted
            if not wanted:
                return None
        return Recording(name, path, cross, self.heads, self.keep, self.values, self.asked["image"])

    def read_tokens(self, _module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before each forward pass: the ids that it is given."""
        self.ran = True
        given = named.get("input_ids", args[0] if args else None)
        if self.encoder:
            if not self.seen.source_tokens:
                self._add(self.seen.source_tokens, given)
            given = named.get("decoder_input_ids")
        self._add(self.seen.tokens, given)

    def _add(self, rows: list[list[Any]], ids: Any) -> None:
        if ids is None or ids.ndim != 2 or ids.is_floating_point():
            return
        if not rows:
            rows += [[] for _ in ids]
        for row, more in zip(rows, ids.tolist(), strict=True):
            row += more if self.tokenizer is None else [self.tokenizer.decode([token]) for token in more]

    def check_chosen(self, attentions: str) -> None:
        """At the block's end: was anything seen, and all that was chosen?"""
        if self.ran and not self.recordings:
            raise RuleError(
                f"{self.seen.model} ran, but no attention was seen: its classes ({attentions}) do not go through "
                "Transformers' AttentionInterface."
            )
        missing = [one for one in self.layers or () if one not in self.met]
        if self.ran and missing:
            raise SelectionError(f"layers: there is no {missing[0]!r} in {self.seen.model}.")

    def finish(self) -> None:
        """Each layer's pieces joined, the pieces let go."""
        order = list(self.paths.values())
        parts = sorted(self.parts.items(), key=lambda item: order.index(item[1].path))
        self.seen.parts = {name: part.finished() for name, part in parts if part.calls}
        self.recordings.clear()


def _heads(given: Collection[int]) -> list[int]:
    """The heads to keep, in order. Raises SelectionError for what is no head's number."""
    for head in given:
        if isinstance(head, bool) or not isinstance(head, (int, np.integer)) or head < 0:
            raise SelectionError(f"heads: {head!r} is no head's number: expected whole numbers from 0 up.")
    return sorted(set(given))


def _stack(path: str) -> str:
    """The first part of a module's path that names a stack of layers."""
    return next((part for part in path.split(".") if part in STACKS), "")
