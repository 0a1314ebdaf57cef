"""Seen: what `ch.watch` saw of a model, each layer's attention with its queries, keys and rules."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from clearhead.core.arrays import as_array, as_host_array
from clearhead.core.axes import WEIGHTS, named
from clearhead.core.effects import Rest, read_rest
from clearhead.core.rule_values import is_whole, layer_name, whole_number
from clearhead.errors import RuleError, SelectionError
from clearhead.loading import load as load_module
from clearhead.ops.display import Display
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.observation import Observation
from clearhead.view.long import ShownLayer, ShownRun
from clearhead.watching.effects import EDGES, HEADS, Edge, Head, Lines, heads_of
from clearhead.watching.layer import Layer
from clearhead.watching.naming import ModulePath, text_of

if TYPE_CHECKING:
    from clearhead.ops.causes import EffectMatrix

_NAMES: dict[str, Literal["tokens", "sources", ""]] = {"own": "tokens", "source": "sources", "": ""}


@dataclass(eq=False)
class Seen(Display):
    """What `ch.watch` saw: `seen[layer]` is an Observation, `seen.matrix(layer)` the AttentionMatrix itself.

    Name a layer by its number, or by its name if a model has several stacks: `seen.layers` lists the names. All arrays
    are (batch, heads, …); generated tokens continue the queries. `len(seen)` is the number of layers, and iterating
    gives each layer's Observation.

    >>> import torch, transformers, clearhead as ch
    >>> config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0, vocab_size=9)
    >>> model = transformers.GPT2Model(config).eval()
    >>> with torch.no_grad(), ch.watch(model, entropy=True) as seen:
    ...     _ = model(torch.tensor([[1, 2, 3, 4]]))
    >>> seen.layers, seen[0].entropy.shape, seen.matrix(0).shape, len(seen.summary())
    (['0', '1'], torch.Size([1, 2, 4]), (1, 2, 4, 4), 4)
    """

    parts: dict[str, Any] = field(default_factory=dict)  # by name, as they ran: layers, and recordings of them
    tokens: list[list[Any]] = field(default_factory=list)  # (batch, length): texts with a tokenizer, ids without
    source_tokens: list[list[Any]] = field(default_factory=list)  # the encoder's, where there is one
    model: str = ""
    unseen: tuple[tuple[str, str], ...] = ()  # (path, class) of attention that ran without Transformers' interface
    watched: Any = field(default=None, repr=False)  # a weak reference to the model, in the process that watched it

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"watched": None}

    @property
    def layers(self) -> list[str]:
        """The names of the layers that ran, in that order; "0#2" is layer 0 run a second time."""
        return list(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def layer(self, layer: int | str) -> Layer:
        """One layer with its name, heads, q, k, v, rules and notes, by its name, number or its module's path.

        Raises SelectionError for an unknown layer.
        """
        if not self.parts and isinstance(layer, (int, str)):
            raise SelectionError("no attention was seen.", "run the model inside the `with` block.")
        if isinstance(layer, str) and layer not in self.parts:
            layer = next((name for name, part in self.parts.items() if part.path == layer), layer)
        part = self.parts[layer_name(layer, self.layers)]
        return part if isinstance(part, Layer) else cast("Layer", part.finished())

    def __iter__(self) -> Iterator[Observation]:
        return (self[name] for name in self.layers)

    def __getitem__(self, layer: int | str) -> Observation:
        """One layer's statistics, each (batch, heads, …). Raises SelectionError for an unknown layer."""
        return self.layer(layer).observation

    def matrix(self, layer: int | str) -> AttentionMatrix:
        """The layer's attention matrix, (batch, heads, queries, keys), which computes any weight on demand.

        Raises SelectionError for an unknown layer.
        """
        return self.layer(layer).matrix()

    def contributions(self, layer: int | str) -> "EffectMatrix":
        """Return each edge's contribution along g, a_ij·(g_i·v_j), (batch, heads, queries, keys), never stored.

        g_i is the gradient that loss.backward() brought to the head's output for query i, before W_O; `ch.watch(model,
        causes=True)` keeps it. A row sums to g_i·o_i. Axes as in `seen.matrix(layer)`.
        Raises SelectionError for an unknown layer; RuleError if `watch` had no causes=True, no backward pass has run,
        or none could reach the layer.
        """
        chosen = self.layer(layer)
        g = chosen.g
        return chosen.matrix().contributions(chosen.v, g)

    def cut_effects(self, layer: int | str, *, rest: Rest = "renormalise") -> "EffectMatrix":
        """Return the change of g_i·o_i when query i may not see key j, (batch, heads, queries, keys), never stored.

        The row is renormalised, or with rest="first" the edge's weight moves to the first token, on which idle heads
        rest (or to the learned sink). Exact at the head's output; all that follows is taken to first order.
        Raises as `contributions`; UnknownNameError for any other `rest`; RuleError for "first" if a text begins with
        padding.

        >>> import torch, transformers, clearhead as ch
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with ch.watch(model, causes=True) as seen:
        ...     logits = model(torch.tensor([[1, 2, 3, 4]])).logits[0, -1]
        ...     (logits[5] - logits[6]).backward()
        >>> E = seen.cut_effects(0)
        >>> E.shape, bool((E[:, :, :3] == 0).all()), len(seen.strongest(3)), len(seen.summary())
        ((1, 2, 4, 4), True, 3, 2)
        """
        chosen = self.layer(layer)
        g = chosen.g
        if read_rest(rest) == "first" and chosen.padding is not None and bool(chosen.padding[:, 0].any()):
            what = f"layer {chosen.name} has a text that begins with padding: its first token is not the first key."
            raise RuleError(what, 'pad on the right, or rest="renormalise".')
        return chosen.matrix().cut_effects(chosen.v, g, rest=rest)

    def strongest(self, k: int = 20, *, rest: Rest = "renormalise") -> Lines[Edge]:
        """Return the k edges of all layers, heads and batch items whose cut changes most; it prints as a table.

        Each is (layer, batch, head, query, key, value, rest), the largest magnitude first. With the default `rest`,
        edges to the first token often lead; rest="first" shows what a row takes from elsewhere. Beyond the head,
        effects are first-order estimates: good in the last layers, where few steps follow; in earlier layers of large
        models even the sign can be wrong. So check them with `seen.verify`, and ask `ch.explain` which part of a text
        made an answer.
        Raises RuleError unless k is a whole number from 1 up, and as `cut_effects`. O(queries·keys·(d_k + d_v)) for
        each layer and head, O(k) memory.
        """
        k = whole_number("k", k, 1, hint="seen.strongest(20)")
        edges: list[Edge] = []
        for name in self.layers:  # of equal ones the first by place
            cuts = self.cut_effects(name, rest=rest).strongest(k)
            columns = (as_host_array(x, "strongest")[0].tolist() for x in cuts)
            edges += [Edge(name, b, h, i, j, value, rest) for b, h, i, j, value in zip(*columns, strict=True)]
            edges = sorted(edges, key=lambda edge: -abs(edge.value))[:k]
        return Lines(edges, "edges table", EDGES, map(self._tokens_of, edges))

    def verify(self, edges: Iterable[Edge], run: Callable[[], Any]) -> Lines[Edge]:
        """Cut each edge in a run of its own and compare with its estimate; prints a table with their rank correlation.

        edges   the result of `seen.strongest`, or some of its edges
        run     a function without arguments that runs the model on the same text and returns the number whose gradient
                was taken

        Calls `run` once, then once per edge with that edge cut by `ch.change`, under no_grad; the edge's `rest` says
        where its weight goes. Each edge returned has its `truth`: the number with the cut minus the number without.
        Raises RuleError if several texts were watched together or the model no longer exists, and as `ch.change`.

        >>> import torch, transformers, clearhead as ch
        >>> config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, eos_token_id=0, bos_token_id=0)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> lead = lambda: model(torch.tensor([[1, 2, 3, 4]])).logits[0, -1, 5]
        >>> with ch.watch(model, causes=True) as seen:
        ...     lead().backward()
        >>> len(seen.verify(seen.strongest(4), lead))
        4
        """
        model = None if self.watched is None else self.watched()
        if model is None:
            raise RuleError(
                "the model that was watched no longer exists, so it cannot run again.",
                "call seen.verify while you hold the model.",
            )
        verified = load_module("hf.changing").verified
        return verified(model, edges, run, max((len(self.layer(name).q) for name in self.layers), default=0))

    def summary(self) -> Lines[Head]:
        """Return a Head per head: weight on the first, the previous and its own token, distance, entropy; a table.

        Distance is in tokens, entropy in nats. With causes=True and a backward pass, `off` is -Σ g·o over queries and
        batch items, the first-order effect of switching the head off (`ch.explain` switches heads off in real runs).
        O(queries) per head if distance and entropy were observed and there are no causes, else
        O(queries·keys·(d_k + d_v)).
        """
        heads = [line for name in self.layers for line in heads_of(self.layer(name))]
        caused = any(head.off == head.off for head in heads)
        return Lines(heads, "summary table", HEADS | ({"off": 13} if caused else {}), unseen=self.unseen)

    def __shown__(self, batch: int, v: Any = None) -> ShownRun:
        if v is not None:
            raise RuleError("v was given, but a watched run has its own v.", "leave v out.")
        results = []
        for name in self.layers:
            layer = self.layer(name)
            matrix = layer.matrix()
            if not is_whole(batch) or not 0 <= batch < matrix.shape[0]:
                raise SelectionError(f"batch {batch} is outside 0..{matrix.shape[0] - 1}.")
            padding = None if layer.padding is None else as_array(layer.padding, "padding")[0][[batch]]
            part = matrix.part(batch)
            try:
                g = layer.g
            except RuleError:  # there is none yet
                g = None
            v, g = (None if x is None else as_array(x, name)[0][[batch]] for name, x in (("v", layer.v), ("g", g)))
            sides = padding, layer.cross, layer.note, v, g, _NAMES[self._text_of(layer.name)]
            results.append(ShownLayer(layer.name, range(matrix.shape[1]), part, *sides))
        texts = max((len(layer.observation.log_sum) for layer in map(self.layer, self.layers)), default=0)
        item = f"batch={batch} of {texts}" if texts > 1 else ""
        name, tokens = self.model or "watched", _texts(self.tokens, batch)
        known = (
            np.flatnonzero(x.padding[0]).tolist()
            for x in results
            if x.padding is not None and not x.cross and x.text == "tokens"
        )
        return ShownRun(
            f"{name}, {item}" if item else name, results, tokens, _texts(self.source_tokens, batch),
            pads=next(known, []) if tokens else [], item=item,
        )  # fmt: skip

    def _tokens_of(self, edge: Edge) -> tuple[str, str]:
        """The tokens of an edge's query and key; "" where they are not known."""
        texts = {"own": self.tokens, "source": self.source_tokens, "": []}
        layer, local = self.layer(edge.layer), self._text_of(edge.layer)
        other = "source" if layer.cross else local
        query, key = (row[0] if (row := texts[side][edge.batch : edge.batch + 1]) else [] for side in (local, other))
        query_word = str(query[edge.query]) if len(query) == layer.observation.queries else ""
        return query_word, str(key[edge.key]) if len(key) == layer.observation.keys else ""

    def _text_of(self, name: str) -> str:
        """Which text a layer's queries come from: the model's "own", its encoder's "source", or "" for none."""
        return text_of(ModulePath.of(self.layer(name).path).stack, has_source=bool(self.source_tokens))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": repr(self)}

    def __repr__(self) -> str:
        lines = ["Seen(nothing yet)"]
        if self.parts:
            layers = [self.layer(name) for name in self.layers]
            first = layers[0].observation
            shape = named((layers[0].q.shape[1], first.queries, first.keys), WEIGHTS)
            lines = [f"Seen({len(layers)} layers of {self.model}, {sum(x.q.shape[1] for x in layers)} heads)"]
            lines.append(f"  layers    {_few(self.layers)}; the first is {shape}")
            rows_of = ("tokens", self.tokens), ("source tokens", self.source_tokens)
            texts = [f"{len(rows)} × {len(rows[0])} {which}" for which, rows in rows_of if rows]
            lines.append(f"  tokens    {', '.join(texts) or 'none'}")
            asked = [name for name, x in first.statistics().items() if x is not None]
            lines.append(f"  observed  {', '.join(asked)}")
        if self.unseen:
            lines.append(f"  not seen  {_few([f'{path} ({kind})' for path, kind in self.unseen])}")
        return "\n".join(lines)


def _few(names: list[str]) -> str:
    return ", ".join(names if len(names) < 7 else [*names[:3], "…", *names[-2:]])


def _texts(rows: list[list[Any]], batch: int) -> list[str] | None:
    return [str(token) for token in rows[batch]] if batch < len(rows) else None
