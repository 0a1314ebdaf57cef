"""`ch.watch`: a model's attention observed while it runs inside a block."""

import warnings
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack
from weakref import ref

import numpy as np

from clearhead.changing.texts import check_tokenizer
from clearhead.core.observations import check_asked
from clearhead.core.rule_values import read_members
from clearhead.core.statistics import Watched, explained
from clearhead.errors import MissingExtraError, RuleError, SelectionError, shown
from clearhead.layers.saved import LAYERS
from clearhead.watching.dividing import Written
from clearhead.watching.seen import Seen

if TYPE_CHECKING:
    from clearhead.layers.attending import Follow, Watch
    from clearhead.layers.passes import LayerCall
    from clearhead.layers.recording import Recording


@explained(Watched.__annotations__)
@contextmanager
def watch(
    model: Any,
    *,
    layers: Collection[int | str] | None = None,
    heads: Collection[int] | None = None,
    keep: bool = True,
    values: bool = False,
    causes: bool = False,
    tokenizer: Any = None,
    **statistics: Unpack[Watched],
) -> Iterator[Seen]:
    """Observe every attention of a Transformers model while it runs inside the block; then it is as it was before.

    model      any Transformers model whose attention goes through its AttentionInterface, or a module that holds one;
               any float dtype, CPU or GPU
    statistics as in `AttentionMatrix.observe`; logsumexp always is observed:

        STATISTICS

    layers     which layers to observe, by number (negative ones count from each stack's end) or name; None is all.
               The others cost what attention costs.
    heads      which heads to keep, in every layer; None is all
    keep       keep queries and keys as well, O(tokens), so that `seen.matrix(layer)` has every weight
    values     keep values as well: `seen.layer(i).v`, for what each key brings to the output
    causes     keep values, and the derivative g that backward() brings by each head's output: for
               `seen.cut_effects(layer)`, `seen.strongest(20)`, `seen.spans("words")` and others
    tokenizer  makes texts of the ids in `seen.tokens`; anything with decode(list of ids)

    Gives a Seen: `seen[layer]` is an Observation, `seen.matrix(layer)` an AttentionMatrix, both (batch, heads, queries,
    …). A block holds one sequence or batch: the steps of `model.generate` follow one another along the queries; of
    `model.generate_batch`, `seen.requests[name]` is each request's own Seen. The model computes what it computed
    before, but for rounding; queries that see only padding get 0, where eager attention takes the mean of everything.
    In training mode dropout acts on the output as before, and the weights are observed before dropout. Masks stay rules
    (causal, window, padding, segments); `seen.layer(i).note` says where a model's own mask has to be stored.
    A module that attends several times in one forward pass (layers that share their weights, images or windows one
    after the other) is a layer for each time: "0", "0#2", "0#3". Compiled models run uncompiled inside the block.
    Merged attention (T5Gemma2: a decoder's keys and an encoder's in one softmax) is one layer whose last
    `seen.layer(i).other_keys` keys are the encoder's, however many steps the decoder went.
    Attention that does not go through the interface is not seen: the model's numbers are right all the same,
    `seen.unseen` lists it, and a UserWarning says so when the block ends.
    With causes=True run the model with gradients on and call loss.backward(), inside the block or after it (where
    layers are checkpointed, inside); parameters may be frozen. Each forward pass gets the derivative by its own
    outputs. As `.grad`, g adds up over backward passes, and is 0 for a layer that the number does not depend on.
    Time is that of attention without watching, O(queries·keys·d_k) for each head, and one more such pass where
    received, peak or image is observed. Memory is O(queries + keys) for each layer and head, and with keep or values
    that of the queries and keys, or of the values; never O(queries·keys), unless a note says so.
    Raises MissingExtraError without PyTorch and Transformers, UnknownNameError for a statistic that there is not,
    SelectionError for layers or heads that do not exist, DtypeError for a model or tokenizer that cannot be used,
    RuleError where the model's attention cannot be watched, or a second sequence begins; with causes=True where no
    graph is recorded, before a layer runs, or weights have dropout.

    >>> import torch, transformers, clearhead as ch
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
    >>> model = transformers.GPT2Model(config).eval()
    >>> with torch.no_grad(), ch.watch(model, received=True) as seen:
    ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
    >>> seen.tokens, round(float(seen[0].received.sum()))
    ([[1, 2, 3, 4]], 8)
    """
    try:
        from clearhead.layers import attending, switching
    except ImportError as error:
        raise MissingExtraError(
            f"watch needs PyTorch and Transformers: {error}.", "pip install 'clearhead[hf]'"
        ) from error
    known = Watched.__annotations__
    asked = {"logsumexp": True} | check_asked(
        {**statistics}, known, ("layers", "heads", "keep", "values", "causes", "tokenizer")
    )
    _check_options(keep=keep, values=values, causes=causes, tokenizer=tokenizer)
    layers = None if layers is None else read_members("layers", layers, *LAYERS)
    chosen = None if heads is None else _heads(heads)
    switching.check(model)
    if any(module in attending.watchers for module in model.modules()):
        raise RuleError("the model is being watched already.", "one `with ch.watch(…)` for one model at a time.")
    watching = _Watching(model, asked, layers, chosen, keep, values or causes, causes, tokenizer)
    with watching.block(attending.watchers):
        yield watching.seen
    if watching.seen.unseen:
        warnings.warn(watching.seen.unseen_sentence(), stacklevel=3)


@dataclass(eq=False)
class _Watching:
    """The state of one block: which layers ran, their recordings, and the tokens."""

    model: Any
    asked: dict[str, Any]
    layers: Collection[int | str] | None
    heads: list[int] | None
    keep: bool
    values: bool
    causes: bool
    tokenizer: Any

    def __post_init__(self) -> None:
        from clearhead.layers.derivatives import Arrivals
        from clearhead.layers.passes import Passes

        self.arrivals = Arrivals() if self.causes else None
        self.passes = Passes(self.model, self._take_tokens, self._begin_pass, self._begin_batches)
        self.recordings: dict[tuple[Seen, LayerCall], Recording | None] = {}
        self.manager: Any = None  # of continuous batching
        self.batch: list[tuple[Seen, int]] = []  # its requests in this pass, and the position of each one's first query
        self.ran: set[int | str] = set()  # which of `layers` ran
        self.seen = self._new()

    @contextmanager
    def block(self, watchers: MutableMapping[Any, Any]) -> Iterator[None]:
        """Inside, the model is watched; in the end the observations of each layer's calls are joined."""
        try:
            with self.passes.followed(watchers, self.attention):
                yield
                self._check_chosen()
        finally:
            for seen in (self.seen, *self.seen.requests.values()):
                seen.parts = {name: part.finished() for name, part in seen.parts.items() if part.calls}
                seen.unseen = self.passes.unseen()
            self.recordings.clear()

    def _new(self) -> Seen:
        written = None if self.tokenizer is None else Written(self.tokenizer)
        return Seen({}, model=type(self.model).__name__, watched=ref(self.model), written=written)

    def _begin_batches(self, manager: Any) -> None:
        """Continuous batching begins. Raises RuleError where it cannot be watched."""
        if self.causes:
            what = "causes=True wants a graph, and continuous batching records none."
            raise RuleError(what, "watch the text of a request in a block of its own.")
        if self.seen.requests and manager is not self.manager:
            raise RuleError("requests were watched already, and others have their names.", "one generate_batch a block")
        self.manager = manager

    def _begin_pass(self, named: Mapping[str, Any]) -> None:
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
        if self.arrivals is not None:
            from clearhead.layers.derivatives import check_graph

            check_graph()

    def attention(self, module: Any) -> "Watch":
        """What to do with this call of an attention module."""
        from clearhead.layers.attending import Watch

        was_eager = self.passes.was_eager(module)
        if self.passes.in_backward(module):
            return Watch(was_eager=was_eager, follow=self._follow_again(module))
        if not self.passes.running:  # a wrapper called its model's `forward`
            self._begin_pass({})
        call = self.passes.call_of(module)
        watched: list[tuple[Recording, int]] = []
        for seen, first in self.batch or [(self.seen, 0)]:
            if (seen, call) not in self.recordings:
                self.recordings[seen, call] = self._recording(call)
            recording = self.recordings[seen, call]
            if recording is None:
                return Watch(was_eager=was_eager)
            seen.parts[recording.name] = recording
            watched.append((recording, first))
        if self.batch:
            return Watch(asked=self.asked, was_eager=was_eager, requests=watched)
        recording = watched[0][0]
        follow = None if recording.derivative is None else recording.follow
        return Watch(recording, recording.wanted(self.asked), was_eager, follow)

    def _follow_again(self, module: Any) -> "Follow | None":
        """How to follow an output that a checkpoint computes again, where it had no graph the first time."""
        from clearhead.layers.derivatives import computed_again

        local = [one for (_, place), one in self.recordings.items() if place.module is module and one is not None]
        waiting = [result for recording in local for result in recording.graphless()]
        if not waiting:
            return None
        return lambda call, output: computed_again(waiting, call.q).follow(output)

    def _recording(self, call: "LayerCall") -> "Recording | None":
        from clearhead.layers.derivatives import LayerDerivative
        from clearhead.layers.recording import Recording

        if self.layers is not None:
            chosen = {layer for layer in self.layers if str(layer) in call.choices}
            self.ran |= chosen
            if not chosen:
                return None
        derivative = None if self.arrivals is None else LayerDerivative(call.name, self.arrivals)
        return Recording(
            call.name, call.path, call.number, call.cross, self.heads, self.keep, self.values, self.asked.get("image"),
            derivative,
        )  # fmt: skip

    def _take_tokens(self, ids: Any, source: Any) -> None:
        """Add the ids that an outermost forward pass is called with; those of many requests were added before."""
        if not self.batch:
            self._add(self.seen, ids, source)

    def _add(self, seen: Seen, ids: Any, source: Any = None) -> None:
        """Add ids (batch, tokens) to what is shown, and to those that the tokenizer reads; an encoder's once."""
        source = None if seen.source_tokens else source
        for name, rows, new in (("tokens", seen.tokens, ids), ("source", seen.source_tokens, source)):
            if new is None or (rows and len(rows) != len(new)):  # another batch, refused by `Recording.check`
                continue
            read = None if seen.written is None else getattr(seen.written, name)
            for kept in (rows, read):
                if kept is not None and not kept:
                    kept += [[] for _ in new]
            for place, more in enumerate(new.tolist()):
                rows[place] += more if read is None else [self.tokenizer.decode([token]) for token in more]
                if read is not None:
                    read[place] += more

    def _check_chosen(self) -> None:
        """At the block's end: raise where no attention was seen, a chosen layer was not, or a request failed."""
        for recording in self.recordings.values():
            if recording is not None and recording.failed is not None:
                raise recording.failed
        passes = self.passes
        if passes.entered and not passes.went_through:
            kinds = ", ".join(dict.fromkeys(kind for _, kind in passes.unseen()))
            why = f"{kinds} does not go through Transformers' AttentionInterface" if kinds else "it has none"
            raise RuleError(f"{self.seen.model} ran, but no attention was seen: {why}.")
        missing = [layer for layer in self.layers or () if layer not in self.ran]
        if passes.went_through and missing:
            raise SelectionError(f"layers: there is no {missing[0]!r} in {self.seen.model}.")


def _check_options(*, keep: Any, values: Any, causes: Any, tokenizer: Any) -> None:
    """Raise RuleError or DtypeError for values that are not what `watch` says."""
    for name, value in (("keep", keep), ("values", values), ("causes", causes)):
        if not isinstance(value, (bool, np.bool_)):
            raise RuleError(f"{name} is {shown(value)}: expected True or False.")
    if causes and not keep:
        raise RuleError("keep is False, and causes=True needs queries, keys and values.", "keep=True")
    check_tokenizer(tokenizer)


def _heads(inputs: Any) -> list[int]:
    """The heads to keep, sorted. Raises SelectionError for anything but whole numbers from 0 up."""
    heads = read_members("heads", inputs, (int, np.integer), "a list of whole numbers from 0 up", "heads=[0, 1]")
    if heads and min(heads) < 0:
        raise SelectionError(f"heads holds {min(heads)}: expected a list of whole numbers from 0 up.", "heads=[0, 1]")
    return sorted(set(heads))
