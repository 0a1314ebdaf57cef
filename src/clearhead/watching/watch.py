"""`ch.watch`: observes a model's attention while it runs inside a block."""

import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Unpack

from clearhead.core.observations import check_asked
from clearhead.core.rule_values import read_members
from clearhead.core.rules import with_options
from clearhead.core.statistics import Watched, explained
from clearhead.loading import load
from clearhead.watching.naming import LAYERS
from clearhead.watching.pieces import check_tokenizer
from clearhead.watching.seen import Seen

_OPTIONS = ("layers", "causes", "tokenizer")


class Wish(NamedTuple):
    """The arguments of `ch.watch`; statistics include the log-sum-exp."""

    statistics: dict[str, Any]
    layers: list[int | str] | None
    causes: bool
    tokenizer: Any


def room_of(model: Any, tokenizer: Any) -> tuple[str, Any, Any]:
    """Choose the package that watches and changes a model, `hf` or `models`; return it, inner model and tokenizer."""
    check_tokenizer(tokenizer)
    if not hasattr(model, "differentiated"):  # not a LanguageModel
        return "hf", model, tokenizer
    if hasattr(model, "decoder"):
        return "models", model, tokenizer
    decode = partial(model.tokenizer.encoder.decode, skip_special_tokens=False)
    return "hf", model.inner, SimpleNamespace(decode=decode) if tokenizer is None else tokenizer


@with_options
@explained(Watched.__annotations__)
@contextmanager
def watch(
    model: Any,
    *,
    layers: Collection[int | str] | None = None,
    causes: bool = False,
    tokenizer: Any = None,
    **statistics: Unpack[Watched],
) -> Iterator[Seen]:
    """Observe every attention of a model while it runs inside the block; afterwards the model is as before.

    model      any Transformers model whose attention goes through its AttentionInterface, or a module that holds one;
               any float dtype, CPU or GPU. Or a model from `ch.load_model`: one that runs in NumPy must call
               `model.run(text)` once in the block, and has no causes; of one in Transformers, `model.inner` is watched
    statistics as in `AttentionMatrix.observe`; logsumexp is always observed:

        STATISTICS

    layers     the layers to observe, by number (negative ones count from each stack's end) or name; None is all.
               Other layers cost only their attention
    causes     keep the gradient g that backward() brings to each head's output, for `seen.cut_effects(layer)`,
               `seen.strongest(20)` and others
    tokenizer  decodes the ids in `seen.tokens` to texts; anything with decode(list of ids). A model from
               `ch.load_model` uses its own by default

    Yields a Seen: `seen[layer]` is an Observation, `seen.matrix(layer)` an AttentionMatrix, both (batch, heads,
    queries, …). A block holds one sequence or batch; the steps of `model.generate` continue it along the queries. The
    model's results stay the same up to rounding, except that queries that see only padding give 0, where eager
    attention gives the mean of everything. In training mode, dropout acts on the output as before; weights are observed
    before dropout. Masks become rules (causal, window, padding, segments); if a model's mask has to be stored,
    `seen.layer(i).note` says so.
    A module that attends several times in one forward pass (shared weights, several images or windows) is a layer for
    each time: "0", "0#2", "0#3". Compiled models run uncompiled inside the block.
    Merged attention (T5Gemma2: a decoder's keys and an encoder's in one softmax) is one layer whose last
    `seen.layer(i).other_keys` keys are the encoder's; watch it in one forward pass.
    Attention that does not go through the interface is not seen, though the model's results stay right: `seen.unseen`
    lists it, and a UserWarning says so when the block ends.
    With causes=True, run the model with gradients on and call loss.backward(), inside the block or after it (inside, if
    layers are checkpointed); parameters may be frozen. Like `.grad`, g adds up over backward passes, and is 0 for a
    layer that the number does not depend on.
    Takes the time of attention, O(queries·keys·d_k) per head, and one more such pass if received, peak or image is
    observed. Keeps queries, keys and values in memory; never O(queries·keys), unless a note says so.
    Raises MissingExtraError without PyTorch and Transformers, UnknownNameError for an unknown statistic, SelectionError
    for layers that do not exist, DtypeError for an unsuitable model or tokenizer, RuleError if the model's attention
    cannot be watched or a second sequence begins; with causes=True, also if no graph is recorded, before any layer
    runs, or if weights have dropout.

    >>> import torch, transformers, clearhead as ch
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
    >>> model = transformers.GPT2Model(config).eval()
    >>> with torch.no_grad(), ch.watch(model, received=True) as seen:
    ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
    >>> seen.tokens, round(float(seen[0].received.sum()))
    ([[1, 2, 3, 4]], 8)
    """
    room, inner, reader = room_of(model, tokenizer)
    watched = load("hf.watching" if room == "hf" else "models.model").watched
    asked = {"logsumexp": True} | check_asked({**statistics}, Watched.__annotations__, _OPTIONS)
    some = None if layers is None else read_members("layers", layers, *LAYERS)
    with watched(inner, Wish(asked, some, causes, reader)) as seen:
        yield seen
    if seen.unseen:
        kinds = Counter(kind for _, kind in seen.unseen)
        said = ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in kinds.items())
        warnings.warn(
            f"{seen.model} has attention that does not go through Transformers' AttentionInterface and was not seen: "
            f"{said}. seen.unseen has the paths.",
            stacklevel=3,
        )
