"""`ch.why`: why a model says one token and not another, from the edges of its attention, the text's tokens and heads.

Everything here is data, taken from runs; `report` prints it.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clearhead.changing.edits import Edit, off
from clearhead.changing.edits_json import edits_to_json
from clearhead.core.agreement import spearman
from clearhead.core.axes import Array, brief
from clearhead.core.rule_values import whole_number
from clearhead.errors import RuleError, SelectionError, shown
from clearhead.explaining import edit_checks, why_page
from clearhead.explaining.cutting import Edge, cut_again
from clearhead.explaining.derivatives import Derivatives, Target, derivatives, difference, target_of
from clearhead.explaining.gpt2 import ForwardPass, Model, Token
from clearhead.explaining.moving import probabilities
from clearhead.explaining.running import check_given, forward_pass
from clearhead.explaining.stream import of_gpt2
from clearhead.explaining.texts import check_unicode
from clearhead.explaining.way import Way, way
from clearhead.ops.matrix import AttentionMatrix
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.words import Language

if TYPE_CHECKING:
    from clearhead.explaining.hub import HubModel


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
            "model": {"name": self.model.name, **self.model.config._asdict()},
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

    model     a directory in GPT-2 layout or a loaded one; None is the small one that ships with clearhead
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
    >>> found = ch.why("mary had a little")
    >>> found.token.text, found.against.text, found.edges[0][:4], round(found.edges[0].truth, 1)
    (' lamb', ' girl', (0, 2, 3, 0), -3.3)
    """
    check_given(text, each)
    from clearhead.explaining.hub import find

    loaded, count = find(model), whole_number("count", count, 1)
    if not isinstance(loaded, Model):
        raise RuleError(
            f"{loaded.name} runs in PyTorch, and why is for GPT-2 checkpoints, which run in NumPy.",
            "ch.watch(model, causes=True) finds causes in PyTorch's models.",
        )
    given = edit_checks.checked(edits, loaded.config.layers, loaded.config.heads, loaded.name)
    tokens = loaded.tokens(text)
    found = edit_checks.found_in(given, tokens, text)
    run = forward_pass(loaded, tokens, each, found)
    edit_checks.check_acts(given, found, run.layers)
    assert run.logits is not None
    first, second = (_id_of(loaded, run.logits[-1], *pair) for pair in (("token", token), ("against", against)))
    found_derivatives = derivatives(loaded, run, target_of(run, first, second))
    return _why(loaded, (text, tokens, given), found_derivatives, count, each)


Given = tuple[str, list[Token], tuple[Edit, ...]]
Places = dict[Edge, tuple[float, float]]  # edges, each with its weight and the estimate


def _why(model: Model, given: Given, found: Derivatives, count: int, each: Callable[[range], Iterable[int]]) -> Why:
    run, target, by_head = found.run, found.target, found.heads()
    stream = of_gpt2(model, [token.id for token in given[1]], run, target.position)
    chosen, heaviest, by_token = _estimated(found, count, each)
    edges = list({**chosen, **heaviest})
    strongest = [
        divmod(int(at), by_head.shape[1]) for at in np.argsort(-np.abs(by_head), axis=None)[: (count + 1) // 2]
    ]
    again = []
    for at in each(range(len(edges) + len(strongest))):
        if at < len(edges):
            again.append(float(cut_again(model, run, target, [edges[at]])[0]))
        else:
            again.append(_off_again(model, found, *strongest[at - len(edges)]))
    truth = dict(zip(edges, again, strict=False))
    ranks = {edge: rank for rank, edge in enumerate(sorted(edges, key=lambda edge: -abs(truth[edge])), 1)}
    effects, alone = (
        [EdgeEffect(*edge, *numbers, truth[edge], ranks[edge]) for edge, numbers in part.items()]
        for part in (chosen, heaviest)
    )
    heads = [
        HeadEffect(layer, head, -float(by_head[layer, head]), x)
        for (layer, head), x in zip(strongest, again[len(edges) :], strict=True)
    ]
    return Why(
        model=model,
        text=given[0],
        tokens=given[1],
        token=_candidate(model, run, target, target.token),
        against=_candidate(model, run, target, target.against),
        lead=found.z,
        edges=sorted(effects, key=lambda effect: effect.rank),
        agreement=spearman([x.estimate for x in effects], [x.truth for x in effects]),
        by_token=by_token,
        by_head=by_head,
        heads=sorted(heads, key=lambda head: -abs(head.truth)),
        weights_alone=alone,
        run_again=len(edges),
        edits=given[2],
        ways=[way(stream, id_, model.text(id_)) for id_ in (target.token, target.against)],
    )


def _estimated(found: Derivatives, count: int, each: Callable[[range], Iterable[int]]) -> tuple[Places, Places, Array]:
    """The strongest edges by |estimate|, the largest weights of the target's row, and Σ of cuts to each token."""
    run, row = found.run, found.target.position
    strongest: Places = {}
    heaviest: Places = {}
    by_token = np.zeros(len(run.hidden[0]))
    for number in each(range(len(run.layers))):
        ran = run.layers[number]
        weights = AttentionMatrix(ran.q, ran.k, **ran.rules)
        cuts = weights.cuts(ran.v, found.layers[number].g)
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


def _off_again(model: Model, found: Derivatives, layer: int, head: int) -> float:
    """What z changes by when a head's output is 0, from a run of its layer and those after it."""
    hidden, edits = found.run.hidden[layer], (*found.run.edits, off(layers=[layer], heads=[head]))
    with np.errstate(over="ignore", invalid="ignore"):
        for number in range(layer, model.config.layers):
            hidden = model.layer(number, hidden, edits)[1]
        return difference(model, hidden[found.target.position], found.target) - found.z


def _candidate(model: Model, run: ForwardPass, target: Target, token: int) -> Candidate:
    assert run.logits is not None
    logits = run.logits[target.position]
    return Candidate(token, model.text(token), float(probabilities(logits)[token]), float(logits[token]))


def _id_of(model: Model, logits: Array, name: str, wanted: int | str | None) -> int | None:
    """The id of a token that a reader names: " wall", "␣wall", or "wall" for the likelier of "wall" and " wall"."""
    if not isinstance(wanted, str):
        return wanted
    check_unicode(name, wanted)
    word = wanted.replace("␣", " ")
    spellings = [word] if not word or word.startswith(" ") else [word, f" {word}"]
    cut = [model.tokenizer.encode(spelling, add_special_tokens=False).ids for spelling in spellings]
    whole = [
        ids[0] for ids in cut if len(ids) == 1 and model.text(ids[0]).strip().casefold() == word.strip().casefold()
    ]
    if not whole:
        parts = ", ".join(repr(model.text(i)) for i in cut[-1][:8]) or "nothing"
        raise SelectionError(
            f"{name} {shown(wanted)} is not one token: the model's vocabulary cuts it into {parts}.",
            "name one token, such as the first of these.",
        )
    return max(whole, key=lambda i: float(logits[i]))
