"""`ch.change`: a model whose attention is edited while it runs inside a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from clearhead.changing.edits import read_edits
from clearhead.loading import load
from clearhead.watching.saved import Run
from clearhead.watching.watch import room_of


@contextmanager
def change(model: Any, edits: Any, *, tokenizer: Any = None) -> Iterator[None]:
    """Run a model with its attention edited; after the block it is as it was, to the bit.

    model      any model that `ch.watch` takes; one device, any float dtype, CPU or GPU. A decoder in NumPy runs by
               `model.run(text)`; for `ch.explain` give it the edits: ch.explain(text, model, edits=[…])
    edits      an edit or a list of edits: ch.cut, ch.boost, ch.tempered, ch.off, ch.scaled, ch.like, ch.values_like
    tokenizer  finds the words that edits name; anything with decode(list of ids)

    Edits of logits (cut, boost, tempered, like) act in the order given, then values_like, then off and scaled.
    Positions and words refer to the text that the model is given first: (batch, tokens) as they are, padding included;
    in cross-attention queries are the decoder's and keys the encoder's. Whatever a model then generates with its cache
    follows, and a slice without a stop reaches into it. Each forward pass that begins a text anew is a text of its own.

    Together with `ch.watch`, around it or inside, the changed attention is seen: its weights, statistics and rules
    (`spans`, `scale`); with `like` the other run's weights. Gradients go through the edited attention; where layers are
    checkpointed, call backward inside the block. Compiled models run uncompiled inside the block.

    Raises, before the model runs: SelectionError for a layer or head that there is not; RuleError for another run
    without what is needed, or a model whose attention does not go through Transformers' AttentionInterface; DtypeError
    for what is no edit or no model; MissingExtraError without PyTorch and Transformers. Before the attention of the
    first layer runs: SelectionError for a position or word that the text has not, or a word that it has several times.
    In its layer: ShapeError for another run of other lengths, RuleError for one with other padding. When the block
    ends: RuleError for an edit that never acted, and a UserWarning for attention that was not changed since it does not
    go through the interface.

    Time is that of attention; each cut with rest="first" is two more passes without values. Memory O(queries + keys)
    for each layer. Layers that no edit names run as before.

    >>> import torch, transformers, clearhead as ch
    >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
    >>> model = transformers.GPT2Model(config).eval()
    >>> with torch.no_grad(), ch.change(model, ch.cut(queries=3, keys=[0, 1])), ch.watch(model) as seen:
    ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
    >>> bool((seen.matrix(0)[0, :, 3, :2] == 0).all())
    True
    """
    room, inner, reader = room_of(model, tokenizer)
    changed = load("hf.changing" if room == "hf" else "models.model").changed
    read = (replace(x, seen=Run.read(x.seen)) if isinstance(x.seen, str) else x for x in read_edits(edits))
    known = tuple(read)
    with changed(inner, known, reader):
        yield
