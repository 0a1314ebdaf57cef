"""`ch.watch` for Transformers models: records the layers that run in the block, and the tokens."""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from clearhead.errors import RuleError, SelectionError
from clearhead.hf import attending
from clearhead.hf.call import AttentionCall
from clearhead.hf.derivatives import Arrivals, LayerDerivative
from clearhead.hf.passes import Passes, in_backward, models
from clearhead.hf.recording import Recording
from clearhead.watching.naming import LayerCall
from clearhead.watching.seen import Seen
from clearhead.watching.watch import Wish

_UNMOVED = re.compile("Rotary|^OPTLearned")  # modules whose positions padding does not move; OPT counts along its mask


def watched(model: Any, wish: Wish) -> AbstractContextManager[Seen]:
    """Watch the model inside the block; errors as `ch.watch`."""
    return _Watching(model, wish).block()


class _Watching(Passes):
    """The state of one block: which layers ran, their recordings, and the tokens."""

    registry = attending.watchers
    already = "the model is being watched already.", "one `with ch.watch(…)` for one model at a time."

    def __init__(self, model: Any, wish: Wish) -> None:
        super().__init__(model)
        self.wish, self.arrivals = wish, Arrivals() if wish.causes else None
        self.recordings: dict[LayerCall, Recording | None] = {}
        self.chosen: set[int | str] = set()  # which of the wish's layers ran
        self.seen = Seen({}, model=type(model).__name__, watched=ref(model))

    @contextmanager
    def block(self) -> Iterator[Seen]:
        """Watch the model inside the block; at its end, join the observations of each layer's calls."""
        try:
            with self.followed():
                yield self.seen
                self._check_chosen()
        finally:
            self.seen.parts = {name: part.finished() for name, part in self.seen.parts.items() if part.calls}
            self.seen.unseen = self.unseen()
            self.recordings.clear()

    def begin_pass(self, named: Mapping[str, Any]) -> None:
        """Raise RuleError if causes=True and no derivative can come; warn of padding that moves positions."""
        if self.arrivals is not None and not torch.is_grad_enabled():
            raise RuleError(
                "causes=True needs gradients, and the model runs without a graph (torch.no_grad, torch.inference_mode, "
                "model.generate).",
                "call model(ids) with gradients on, once over the whole text, which may be one that it generated.",
            )
        self._warn_of_positions(named)

    def attended(self, layer: LayerCall, call: AttentionCall, dropout: float) -> Tensor:
        """Compute a call's output, (batch, heads, queries, d_v), and record it if its layer was chosen."""
        if in_backward():
            return call.attended(dropout)
        if not self.running:  # a wrapper called its model's `forward`
            self.begin_pass({})
        if layer not in self.recordings:
            self.recordings[layer] = self._recording(layer)
        recording = self.recordings[layer]
        if recording is None:
            return call.attended(dropout)
        self.seen.parts[layer.name] = recording
        return recording.attend(call, dropout)

    def _warn_of_positions(self, named: Mapping[str, Any]) -> None:
        """Warn if a text begins with padding that the model will count as positions, for want of position_ids."""
        mask: Any = named.get("attention_mask")
        begins = named.get("past_key_values") is None and getattr(mask, "ndim", 0) == 2
        if not begins or named.get("position_ids") is not None or bool(mask[:, 0].all()):
            return
        if _counts_padding(self.model):
            warnings.warn(
                f"{int((mask[:, 0] == 0).sum())} of {len(mask)} texts begin with padding, and {self.seen.model} is "
                "given no position_ids: it counts the padding as positions, which changes its weights. Pad on the "
                "right, or pass position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0), as model.generate does.",
                stacklevel=2,
            )

    def _recording(self, call: LayerCall) -> Recording | None:
        if self.wish.layers is not None:
            chosen = {layer for layer in self.wish.layers if str(layer) in call.choices}
            self.chosen |= chosen
            if not chosen:
                return None
        derivative = None if self.arrivals is None else LayerDerivative(call.name, self.arrivals)
        return Recording(call, self.wish, derivative)

    def take_tokens(self, ids: Any, source: Any) -> None:
        """Add ids (batch, tokens), or their texts, to `seen.tokens`; an encoder's only once."""
        seen, reader = self.seen, self.wish.tokenizer
        source = None if seen.source_tokens else source
        for rows, new in ((seen.tokens, ids), (seen.source_tokens, source)):
            if new is None or (rows and len(rows) != len(new)):  # another batch, refused by `Recording.check`
                continue
            if not rows:
                rows += [[] for _ in new]
            for row, more in zip(rows, new.tolist(), strict=True):
                row += more if reader is None else [reader.decode([token]) for token in more]

    def _check_chosen(self) -> None:
        """At the block's end, raise an error if no attention was seen, or a chosen layer was not."""
        if self.entered and not self.went_through:
            kinds = ", ".join(dict.fromkeys(kind for _, kind in self.unseen()))
            why = f"{kinds} does not go through Transformers' AttentionInterface" if kinds else "it has none"
            raise RuleError(f"{self.seen.model} ran, but no attention was seen: {why}.")
        missing = [layer for layer in self.wish.layers or () if layer not in self.chosen]
        if self.went_through and missing:
            raise SelectionError(f"layers: there is no {missing[0]!r} in {self.seen.model}.")


def _counts_padding(model: Any) -> bool:
    """Does padding before a text change the model's results, unless it is given `position_ids`?

    Not if only distances of positions count (rotary embeddings), or if the model derives positions from ids or mask.
    """
    takes = any("position_ids" in signature(part.forward).parameters for part in models(model))
    kinds = {type(module) for module in model.modules()}
    by_ids = any(hasattr(kind, "create_position_ids_from_input_ids") for kind in kinds)
    return takes and not by_ids and not any(_UNMOVED.search(kind.__name__) for kind in kinds)
