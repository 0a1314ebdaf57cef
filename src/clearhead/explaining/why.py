"""`ch.why`: why a model says one token and not another, from the edges of its attention, the text's tokens and heads.

Everything here is data, taken from runs; `report` prints it.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.changing.edits_json import edits_to_json
from clearhead.core.agreement import spearman
from clearhead.core.axes import Array, brief
from clearhead.core.rule_values import whole_number
from clearhead.errors import RuleError, SelectionError, shown
from clearhead.explaining import editing, why_page
from clearhead.explaining.ablation import Edge, cut_again, off_again
from clearhead.explaining.attribution import Way, way
from clearhead.explaining.derivatives import Derivatives, derivatives, target_of
from clearhead.explaining.forward import check_arguments, forward_pass
from clearhead.explaining.stream import of_decoder
from clearhead.explaining.texts import check_unicode
from clearhead.models.model import Model
from clearhead.models.protocol import Each, Token, probabilities
from clearhead.ops.matrix import AttentionMatrix
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.words import Language

if TYPE_CHECKING:
    from clearhead.models.hub import HubModel


class Candidate(NamedTuple):
    """A token that may come next, its probability and its logit."""

    id: int
    text: str
    probability: float
    logit: float


class EdgeEffect(NamedTuple):
    """One edge of one head, and what the lead changes by when it is cut: estimated, and run again.

    `rank` is its place, from 1, by |truth| among all edges that were run again.
    """

    layer: int
    head: int
    query: int
    key: int
    weight: float
    estimate: float
    truth: float
    rank: int

    @property
    def edge(self) -> Edge:
        """Its place."""
        return Edge(*self[:4])


class HeadEffect(NamedTuple):
    """One head, and what the lead changes by when its output becomes 0: estimated, −Σ_i g_i·o_i, and run again."""

    layer: int
    head: int
    estimate: float
    truth: float


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Why:
    """Why one token and not another follows a text; made by `why`.

    `lead` is z = logit(token) − logit(against). Effects are what z changes by, below 0 where
    something helped the token.
    """

    model: Model
    text: str
    tokens: list[Token]
    token: Candidate
    against: Candidate
    lead: float
    edges: list[EdgeEffect]  # the strongest by |estimate| over all layers and heads, then by |truth|
    agreement: float | None  # Spearman's correlation of their estimates with the truth; None for fewer than three
    by_token: Array  # (tokens,): the sum of the estimates of all edges to it, over layers, heads and queries
    by_head: Array  # (layers, heads): Σ_i g_i·o_i, what each head brings to z, to first order
    heads: list[HeadEffect]  # the strongest by |estimate|, half as many as edges, then by |truth|
    weights_alone: list[EdgeEffect]  # the largest weights of the last token's row over all layers and heads
    run_again: int  # how many edges were
    edits: tuple[Edit, ...] = ()  # of the attention, in force in all runs
    ways: Sequence[Way] = ()  # to the token and to the other one: what each part of the model adds to their logits

    def __repr__(self) -> str:
        parts = {"": repr(self.text), "token": repr(self.token.text), "against": repr(self.against.text)}
        return brief("Why", parts | {"lead": f"{self.lead:.3g}", "edges": len(self.edges)}).replace("( ", "(")

    def to_html(self, language: Language = "en") -> str:
        """A page with these causes above every step of the run. Raises RuleError for another language."""
        return page.html(self._document(language))

    def save(self, path: str | os.PathLike[str], language: Language = "en") -> None:
        """Write that page to an .html file, whole or not at all. Raises FileError, RuleError for another language."""
        page.write(path, lambda: self._document(language))

    def _document(self, language: Language) -> Document:
        return why_page.document(self.model, self.edits, self.ways, self.to_json(), language)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain numbers, lists and words."""
        return {
            "model": {"name": self.model.name, **self.model.config.facts()},
            "text": self.text,
            "tokens": [token._asdict() for token in self.tokens],
            "token": self.token._asdict(),
            "against": self.against._asdict(),
            "lead": self.lead,
            "edges": [edge._asdict() for edge in self.edges],
            "agreement": self.agreement,
            "by_token": self.by_token.tolist(),
            "by_head": self.by_head.tolist(),
            "heads": [head._asdict() for head in self.heads],
            "weights_alone": [edge._asdict() for edge in self.weights_alone],
            "edges_run_again": self.run_again,
            "ways": [each.to_json() for each in self.ways],
        } | ({"edits": json.loads(edits_to_json(self.edits))} if self.edits else {})


def why(
    text: str,
    model: "str | os.PathLike[str] | Model | HubModel | None" = None,
    *,
    token: int | str | None = None,
    against: int | str | None = None,
    count: int = 8,
    edits: Any = None,
    each: Callable[[range], Iterable[int]] = iter,
) -> Why:
    """Say why `token` and not `against` follows a text: `clearhead explain --why` as an object.

    With z = logit(token) − logit(against) after the last token and g_i = ∂z/∂o_i, the effect of an edge is what z
    changes by when query i may not see key j: a_ij/(1 − a_ij)·(g_i·o_i − g_i·v_j), as `A.cuts(v, g)` has it, exact at
    the head's output and first order beyond. What is listed is run again with that edge cut, for the true effect.

    model     a path or a name, as `load_model` takes them, or a loaded one; None is the small one that ships with
              clearhead
    token     a word of the vocabulary or an id; a word without a leading space stands for the likelier of both
              spellings. None is the likeliest next token
    against   likewise; None is the likeliest other one
    count     how many edges and weights to list at most, and half as many heads
    edits     an edit or a list of edits that are in force in all runs: cut, boost, tempered, scaled or off
    each      iterates over layers and over what is run again, such as a progress bar

    Returns a Why: the two candidates, `lead` z, `edges` with estimate and truth, `by_token` (tokens,), `by_head`
    (layers, heads), `heads`, and `weights_alone`: the largest weights of the last token's row over all heads, the first
    key and the token itself included, with what they did in truth; `save`, `to_html`, `to_json`. Raises as `explain`,
    and RuleError for a model that is not run in NumPy and for an edit without a derivative, SelectionError for a word
    that is not one token and where both tokens are the same. Time of three forward passes, and of one at most for each
    edge or head run again.

    >>> import clearhead as ch
    >>> cause = ch.why("mary had a little")
    >>> cause.token.text, cause.against.text, cause.edges[0][:4], round(cause.edges[0].truth, 1)
    (' lamb', ' girl', (0, 2, 3, 0), -3.3)
    """
    check_arguments(text, each)
    from clearhead.models.finding import load_model

    loaded, count = load_model(model), whole_number("count", count, 1)
    if not isinstance(loaded, Model):
        raise RuleError(
            "{name} runs in PyTorch, and why is for GPT-2 checkpoints, which run in NumPy.",
            "ch.watch(model, causes=True) finds causes in PyTorch's models.",
            name=loaded.name,
        )
    read = editing.checked(edits, loaded.config.layers, loaded.config.heads, loaded.name)
    tokens = loaded.tokens(text)
    placed = editing.by_position(read, tokens, text)
    run = forward_pass(loaded, tokens, each, placed)
    editing.check_acts(read, placed, run.layers)
    assert run.logits is not None
    first, second = (_id_of(loaded, run.logits[-1], *pair) for pair in (("token", token), ("against", against)))
    result = derivatives(loaded, run, target_of(run, first, second))
    z, target, by_head = result.z, result.target, result.heads()
    strongest, heaviest, by_token = _estimated(result, count, each)
    edges, heads = _run_again(loaded, result, {**strongest, **heaviest}, (count + 1) // 2, each)
    stream = of_decoder(loaded, [token.id for token in tokens], run, target.position)
    logits = run.logits[target.position]
    shares = probabilities(logits)
    candidates = [Candidate(i, loaded.text(i), float(shares[i]), float(logits[i])) for i in target[1:]]
    listed = [edge for edge in edges if edge.edge in strongest]
    return Why(
        model=loaded,
        text=text,
        tokens=tokens,
        token=candidates[0],
        against=candidates[1],
        lead=z,
        edges=listed,
        agreement=spearman([edge.estimate for edge in listed], [edge.truth for edge in listed]),
        by_token=by_token,
        by_head=by_head,
        heads=heads,
        weights_alone=[next(edge for edge in edges if edge.edge == place) for place in heaviest],
        run_again=len(edges),
        edits=read,
        ways=[way(stream, candidate.id, candidate.text) for candidate in candidates],
    )


Places = dict[Edge, tuple[float, float]]  # edges, each with its weight and the estimate


def _estimated(causes: Derivatives, count: int, each: Each) -> tuple[Places, Places, Array]:
    """The strongest edges by |estimate|, the largest weights of the target's row, and Σ of cuts to each token."""
    run, row = causes.run, causes.target.position
    strongest: Places = {}
    heaviest: Places = {}
    by_token = np.zeros(len(run.hidden[0]))
    for number in each(range(len(run.layers))):
        ran = run.layers[number]
        weights = AttentionMatrix(ran.q, ran.k, **ran.rules)
        cuts = weights.cuts(ran.v, causes.layers[number].g)
        seen = cuts.observe(by_key=True, strongest=count)
        by_token += np.asarray(seen.by_key, np.float64).sum(axis=0)
        assert seen.strongest is not None
        for head, query, key, value in zip(*(x.tolist() for x in seen.strongest[1:]), strict=True):
            if value:
                strongest[Edge(number, head, query, key)] = float(weights[head, query, key]), value
        largest = np.asarray(weights[:, row], np.float64)
        for place in np.argsort(-largest, axis=None, kind="stable")[:count].tolist():
            head, key = divmod(place, largest.shape[1])
            if largest[head, key]:
                heaviest[Edge(number, head, row, key)] = float(largest[head, key]), float(cuts[head, row, key])
    return _first(strongest, 1, count), _first(heaviest, 0, count), by_token


def _first(places: Places, by: int, count: int) -> Places:
    """The places whose number of this kind is largest in magnitude."""
    return dict(sorted(places.items(), key=lambda item: -abs(item[1][by]))[:count])


def _run_again(
    model: Model, causes: Derivatives, places: Places, count: int, each: Each
) -> tuple[list[EdgeEffect], list[HeadEffect]]:
    """The true effects of these edges and of the `count` heads that bring most, the largest first."""
    run, target, by_head = causes.run, causes.target, causes.heads()
    order = np.argsort(-np.abs(by_head), axis=None)[:count]
    edges, heads = list(places), [divmod(int(place), by_head.shape[1]) for place in order]
    truths = []
    for number in each(range(len(edges) + len(heads))):
        if number < len(edges):
            truths.append(float(cut_again(model, run, target, [edges[number]])[0]))
        else:
            truths.append(off_again(model, run, target, *heads[number - len(edges)]))
    ranked = sorted(zip(edges, truths, strict=False), key=lambda pair: -abs(pair[1]))
    effects = [EdgeEffect(*edge, *places[edge], truth, rank) for rank, (edge, truth) in enumerate(ranked, 1)]
    pairs = zip(heads, truths[len(edges) :], strict=True)
    of_heads = [HeadEffect(layer, head, -float(by_head[layer, head]), truth) for (layer, head), truth in pairs]
    return effects, sorted(of_heads, key=lambda head: -abs(head.truth))


def _id_of(model: Model, logits: Array, name: str, wanted: int | str | None) -> int | None:
    """The id of a token that a reader names: " wall", "␣wall", or "wall" for the likelier of "wall" and " wall"."""
    if not isinstance(wanted, str):
        return wanted
    check_unicode(name, wanted)
    word = wanted.replace("␣", " ")
    spellings = [word] if not word or word.startswith(" ") else [word, f" {word}"]
    cut = [model.tokenizer.encode(spelling, add_special_tokens=False).ids for spelling in spellings]
    plain = word.strip().casefold()
    whole = [ids[0] for ids in cut if len(ids) == 1 and model.text(ids[0]).strip().casefold() == plain]
    if not whole:
        parts = ", ".join(repr(model.text(i)) for i in cut[-1][:8]) or "nothing"
        values = {"name": name, "token": shown(wanted), "parts": parts}
        raise SelectionError(
            "{name} {token} is not one token: the model's vocabulary cuts it into {parts}.",
            "name one token, such as the first of these.",
            **values,
        )
    return max(whole, key=lambda i: float(logits[i]))
