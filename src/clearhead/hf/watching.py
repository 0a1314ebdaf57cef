"""What `ch.watch` does with a model: which layers run in its block, their recordings, and the tokens."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import RuleError, SelectionError
from clearhead.hf import attending
from clearhead.hf.attending import Watch
from clearhead.hf.call import AttentionCall
from clearhead.hf.derivatives import Arrivals, LayerDerivative, computed_again
from clearhead.hf.passes import Passes, models
from clearhead.hf.recording import Recording
from clearhead.watching.naming import LayerCall
from clearhead.watching.seen import Seen
from clearhead.watching.watch import Wish

_UNMOVED = re.compile("Rotary|^OPTLearned")  # OPT counts along its mask


def watched(model: Any, wish: Wish) -> AbstractContextManager[Seen]:
    """Inside, the model is watched; the arguments are those of `ch.watch`, and it says what is raised."""
    return _Watching(model, wish).block()


class _Watching(Passes):
    """The state of one block: which layers ran, their recordings, and the tokens."""

    registry = attending.watchers
    already = "the model is being watched already.", "one `with ch.watch(…)` for one model at a time."

    def __init__(self, model: Any, wish: Wish) -> None:
        super().__init__(model)
        self.wish, self.arrivals = wish, Arrivals() if wish.causes else None
        self.recordings: dict[tuple[Seen, LayerCall], Recording | None] = {}
        self.manager: Any = None  # of continuous batching
        self.batch: list[tuple[Seen, int]] = []  # its requests in this pass, and the position of each one's first query
        self.ran: set[int | str] = set()  # which of `layers` ran
        self.seen = self._new()

    @contextmanager
    def block(self) -> Iterator[Seen]:
        """Inside, the model is watched; in the end the observations of each layer's calls are joined."""
        try:
            with self.followed():
                yield self.seen
                self._check_chosen()
        finally:
            for seen in (self.seen, *self.seen.requests.values()):
                seen.parts = {name: part.finished() for name, part in seen.parts.items() if part.calls}
                seen.unseen = self.unseen()
            self.recordings.clear()

    def _new(self) -> Seen:
        return Seen({}, model=type(self.model).__name__, watched=ref(self.model))

    def begin_batches(self, manager: Any, model: Any) -> None:
        """Continuous batching begins. Raises RuleError where it cannot be watched."""
        if model not in self.paths:
            return
        if self.arrivals is not None:
            what = "causes=True wants a graph, and continuous batching records none."
            raise RuleError(what, "watch the text of a request in a block of its own.")
        if self.seen.requests and manager is not self.manager:
            raise RuleError("requests were watched already, and others have their names.", "one generate_batch a block")
        self.manager = manager

    def begin_pass(self, named: Mapping[str, Any]) -> None:
        """Read whose pass it is. Raises RuleError where derivatives are wanted and none could come."""
        ids: Any = named.get("input_ids")
        self.batch = []
        packed = self.manager is not None and named.get("cache") is not None
        for one in self.manager.batch_processor.inputs_and_outputs.requests_in_batch if packed else ():
            state, first = one.state, one.state.position_offset - one.query_length
            seen = self.seen.requests.get(state.request_id)
            if seen is None or len(seen.tokens[0]) != first:  # it is new, or begins again since the cache was full
                seen = self.seen.requests[state.request_id] = self._new()
                before = state.initial_tokens + state.generated_tokens  # computed for another with the same beginning
                self._add(seen, np.array([before[:first]], int))
            new, ids = ids.tensor_split([one.query_length], 1)
            self._add(seen, new)
            self.batch.append((seen, first))
        if self.arrivals is not None and not torch.is_grad_enabled():
            raise RuleError(
                "causes=True, and the model runs without a graph (torch.no_grad, torch.inference_mode, "
                "model.generate): no derivative would come.",
                "model(ids) with gradients on, once over the whole text, which may be one that it generated.",
            )
        self._warn_of_positions(named)

    def attention(self, module: Any) -> Watch:
        """What to do with this call of an attention module."""
        if self.in_backward(module):
            return Watch(None, self._follow_again(module))
        if not self.running:  # a wrapper called its model's `forward`
            self.begin_pass({})
        call = self.call_of(module)
        watched: list[tuple[Recording, int]] = []
        for seen, first in self.batch or [(self.seen, 0)]:
            if (seen, call) not in self.recordings:
                self.recordings[seen, call] = self._recording(call)
            recording = self.recordings[seen, call]
            if recording is None:
                return Watch()
            seen.parts[recording.name] = recording
            watched.append((recording, first))
        return Watch(requests=watched) if self.batch else Watch(watched[0][0])

    def _warn_of_positions(self, named: Mapping[str, Any]) -> None:
        """Warn where a text begins with padding that the model counts as positions, since nothing says otherwise."""
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

    def _follow_again(self, module: Any) -> Callable[[AttentionCall, Tensor], Tensor] | None:
        """How to follow an output that a checkpoint computes again, where it had no graph the first time."""
        local = [one for (_, place), one in self.recordings.items() if place.module is module and one is not None]
        waiting = [result for recording in local for result in recording.graphless()]
        return (lambda call, output: computed_again(waiting, call.q).follow(output)) if waiting else None

    def _recording(self, call: LayerCall) -> Recording | None:
        if self.wish.layers is not None:
            chosen = {layer for layer in self.wish.layers if str(layer) in call.choices}
            self.ran |= chosen
            if not chosen:
                return None
        derivative = None if self.arrivals is None else LayerDerivative(call.name, self.arrivals)
        return Recording(call, self.wish, derivative)

    def take_tokens(self, ids: Any, source: Any) -> None:
        """Add the ids that an outermost forward pass is called with; those of many requests were added before."""
        if not self.batch:
            self._add(self.seen, ids, source)

    def _add(self, seen: Seen, ids: Any, source: Any = None) -> None:
        """Add ids (batch, tokens), or their texts, to what is shown; an encoder's once."""
        source, reader = None if seen.source_tokens else source, self.wish.tokenizer
        for rows, new in ((seen.tokens, ids), (seen.source_tokens, source)):
            if new is None or (rows and len(rows) != len(new)):  # another batch, refused by `Recording.check`
                continue
            if not rows:
                rows += [[] for _ in new]
            for row, more in zip(rows, new.tolist(), strict=True):
                row += more if reader is None else [reader.decode([token]) for token in more]

    def _check_chosen(self) -> None:
        """At the block's end: raise where no attention was seen, a chosen layer was not, or a request failed."""
        for recording in self.recordings.values():
            if recording is not None and recording.failed is not None:
                raise recording.failed
        if self.entered and not self.went_through:
            kinds = ", ".join(dict.fromkeys(kind for _, kind in self.unseen()))
            why = f"{kinds} does not go through Transformers' AttentionInterface" if kinds else "it has none"
            raise RuleError(f"{self.seen.model} ran, but no attention was seen: {why}.")
        missing = [layer for layer in self.wish.layers or () if layer not in self.ran]
        if self.went_through and missing:
            raise SelectionError(f"layers: there is no {missing[0]!r} in {self.seen.model}.")


def _counts_padding(model: Any) -> bool:
    """Does padding before a text change what this model computes for it, unless it is given `position_ids`?

    It does not where only the distance of two positions counts (rotary embeddings), or where the model numbers its
    positions by its ids or its mask.
    """
    takes = any("position_ids" in signature(part.forward).parameters for part in models(model))
    kinds = {type(module) for module in model.modules()}
    by_ids = any(hasattr(kind, "create_position_ids_from_input_ids") for kind in kinds)
    return takes and not by_ids and not any(_UNMOVED.search(kind.__name__) for kind in kinds)
