"""`ch.explain` finds what made a model's answer: it runs the model again without each part of the text and head."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.effects import Rest
from clearhead.core.rule_values import whole_number
from clearhead.errors import SelectionError
from clearhead.explaining import part_runs, rerun
from clearhead.explaining.answers import Question, read_answers, rival, said_by
from clearhead.explaining.explanation import Estimate, Explanation, Rivals
from clearhead.explaining.part_runs import Again
from clearhead.explaining.rerun import EdgeEffect, HeadEffect, PartEffect, Rerun, forward_pass
from clearhead.explaining.texts import parts_of_text, read, read_slices
from clearhead.models.model import Model
from clearhead.models.protocol import Each, ForwardPass, LanguageModel, choices, layer_numbers
from clearhead.models.tokenizer import Reading

if TYPE_CHECKING:
    from clearhead.models.hub import HubModel

_HEADS, _KEYS = 6, 4  # run again: edges of the heads that did most, the largest weights of each
_ESTIMATED, _LATER = 20, 96  # edges that each estimate chooses to run; edges of all answer tokens after the first
_LONGER = "give a longer text, or clearhead explain TEXT --steps, which shows what each head does with this one."


def explain(
    text: Any,
    model: "str | os.PathLike[str] | Model | HubModel | None" = None,
    *,
    answer: int | str | None = None,
    against: int | str | None = None,
    word: str | None = None,
    generate: int = 0,
    parts: str | Sequence[Any] = "words",
    hide: Any = None,
    count: int = 8,
    each: Callable[[range], Iterable[int]] = iter,
    told: Callable[[Explanation], object] | None = None,
) -> Explanation:
    """Explain a model's answer to a text: which parts of the text, heads and edges made it.

    The model is run again with each part of the text hidden from all later tokens, and with heads and edges off. How y
    changes then is the exact effect of that part, head or edge alone. y is ln P − ln(1 − P) of the answer's probability
    P, or with `against` the lead over the other answer. An integral over gates on all keys chooses the edges to run.

    text      a text, or a list of messages: {"role": "system", "user" or "assistant", "content": a string}
    model     a path or name, as `load_model` takes it, or a loaded model; None: the small model that ships with it
    answer    a text of one or more tokens, or a token's id; a text without a leading space means the likelier of the
              two spellings. None: what the model says: its first whole word or number, or its reply to messages
    against   another answer, given like `answer`; None explains the answer alone
    word      explain only this word of the answer; what comes before it counts as given
    generate  how many tokens the model says at most; 0: up to the end of the first word, in a chat 24
    parts     "tokens", "words", "sentences", "paragraphs", "turns" (of a chat), or (start, stop) pairs of characters
    hide      (start, stop) pairs: only these may be hidden. None: all of the text; in a chat all messages but the last,
              the question, unless there is no other. The last token, which answers, and a chat's template are never
              hidden. The first token, on which heads rest, is replaced by a neutral one instead
    count     how many heads and edges to list at most
    each      iterates over the layers of each run, such as a progress bar
    told      is called with what is known so far: first the answer, then also what hiding each part did

    Up to 48 parts are hidden one by one; of more, first all sentences, then the parts of three. Heads and edges are off
    in the rows that predict the answer. Raises DtypeError for a text or model of another type; RuleError for a model
    that predicts no next token, or whose attention is not causal; SelectionError for a word that is not in the answer,
    parts that overlap or lie outside the text, and two equal answers; ShapeError for an answer or text that is empty or
    too long; FileError for an unreadable model. O(parts) passes, O(tokens) memory.
    Source: integrated gradients (Sundararajan et al. 2017; Aumann and Shapley 1974) over gates of attention.

    >>> import clearhead as ch
    >>> found = ch.explain("mary had a little", against=" girl")
    >>> found.answer, found.ranked[0].text
    (' lamb', 'mary')
    """
    from clearhead.models.finding import load_model

    loaded, more = load_model(model), whole_number("generate", generate, 0)
    listed, reading = whole_number("count", count, 1), read(loaded, text)
    turns = [turn for turn in reading.turns if turn[0] < turn[1]]
    where = turns[:-1] or turns or [(0, len(reading.text))]
    hidden = where if hide is None else read_slices("hide", hide, reading.text)
    run = forward_pass(loaded, reading.tokens, each)
    if word is not None or (answer is None and (more or turns)):
        before = reading
        reading, answer = said_by(loaded, reading, run, answer, word, more, each)
        run = run if reading is before else forward_pass(loaded, reading.tokens, each)
    asked = read_answers(loaded, reading.tokens, run, answer, against)
    cut = parts_of_text(parts, reading.text, reading.tokens, reading.turns, hidden)
    if not cut:
        raise SelectionError("the text has no part to hide: its last token, which answers, is never hidden.", _LONGER)
    neutral = loaded.tokenizer.text(loaded.tokenizer.neutral)
    parts_shown = [PartEffect(*part, 0.0, neutral if 0 in part.tokens else "") for part in cut]
    begun = _begun(loaded, reading, asked, run, each, listed)
    leak = part_runs.leak(begun["again"], [place for part in cut for place in part.tokens])
    found = Explanation(loaded, text, reading, parts=parts_shown, leak=leak, **begun)
    return _explained(found, each, told or (lambda _: None))


def _begun(
    model: LanguageModel, reading: Reading, asked: Question, run: ForwardPass, each: Each, listed: int
) -> dict[str, Any]:
    """Return what is known before anything is run again: the answer, and what the later runs need."""
    runs = [run if one.ids == list(run.ids) else model.run(one.ids, each) for one in asked.targets]
    ids = asked.against or (rival(model, reading, run, asked.answer[0]),)
    pair, row = (asked.answer[0], ids[0]), len(reading.tokens) - 1
    based = [rerun.based_on(*both, each, pair) for both in zip(asked.targets, runs, strict=True)]
    sinks, sizes = rerun.resting(runs[0], row), (model.config.layers, model.config.heads)
    rest: Rest = "first" if 2 * sinks >= sizes[0] * sizes[1] else "renormalise"
    again = Again(model, based, sum(one.value for one in based), rest, listed, pair, {})
    base, texts = np.asarray(runs[0].logits[row]), ["".join(model.tokenizer.texts(x)) for x in (asked.answer, ids)]
    one, two = choices(model, base, pair)
    return {
        "rivals": Rivals(texts[0], one, texts[1], two, bool(asked.against), float(again.value)),
        "next": choices(model, base, rerun.likely(base).tolist()),
        **{name: [] for name in ("groups", "pairs", "heads", "edges")},
        "reruns": ({}, {}, {}),
        "sinks": sinks,
        "again": again,
        "estimate": Estimate(np.zeros(row + 1), np.zeros(sizes), np.full(sizes, np.nan), 0.0, 0.0, 0),
    }


def _explained(found: Explanation, each: Each, told: Callable[[Explanation], object]) -> Explanation:
    """Run the model again without each part, head and edge; call `told` before that and after the parts."""
    told(found)
    again = found.again
    ran = part_runs.hidden(again, found.parts, found.reading.text)
    told(replace(found, parts=ran.parts, groups=ran.groups))
    tokens = [token for part in found.parts for token in part.tokens]
    (by_key, by_edge, beside), total, points = part_runs.integrated(again, tokens, each)
    by_head, of_token = by_key.sum(axis=2), by_key.sum(axis=(0, 1)) + beside
    effects = [part._replace(effect=float(of_token[list(part.tokens)].sum())) for part in ran.parts]
    parts, groups = part_runs.weighed(again, ran._replace(parts=effects), total, integrated=points > 0)
    by_token = np.zeros(len(found.reading.tokens))
    for part in [*groups, *(part for part in parts if part.hidden is not None)]:
        by_token[list(part.tokens)] = -(part.hidden or 0.0) / len(part.tokens)
    heads, heads_run, off = _heads(again, by_head)
    edges, without = _edges(again, [by_edge, part_runs.cuts(again)], off)
    numbers = layer_numbers(again.model)
    edges = [edge._replace(layer=numbers[edge.layer]) for edge in edges]
    heads = [head._replace(layer=numbers[head.layer]) for head in heads]
    return replace(
        found,
        parts=parts,
        groups=groups,
        pairs=part_runs.pairs(again, parts, total),
        heads=[head._replace(edge=next((one for one in edges if one[:2] == head[:2]), None)) for head in heads],
        edges=edges[: again.listed],
        reruns=(off, ran.runs, without),
        estimate=Estimate(by_token, by_head, heads_run, total, total - sum(part.effect for part in parts), points),
    )


def _heads(again: Again, by_head: Array) -> tuple[list[HeadEffect], Array, dict[tuple[int, int], Rerun]]:
    """Rank heads by the change of y with each off in the rows that answer; return also all changes and the runs."""
    changes, off = rerun.each_off(again.model, again.based, by_head, 2 * again.listed)
    listed = sorted(off, key=lambda place: (-abs(changes[place]), -abs(by_head[place]), place))[: again.listed]
    others = part_runs.anywhere(again, listed)
    return [HeadEffect(*place, float(changes[place]), x) for place, x in zip(listed, others, strict=True)], changes, off


def _edges(
    again: Again, estimates: Sequence[Array], off: dict[tuple[int, int], Rerun]
) -> tuple[list[EdgeEffect], dict[tuple[int, ...], Rerun]]:
    """Rank edges of the rows that answer by the change of y without each; return also their runs.

    Run again are the strongest edges of each estimate, (layers, heads, rows, keys), and the largest weights of the
    heads without which y, or the odds of one of the answer's later tokens, change most.
    """
    based, chosen = again.based[0], dict[tuple[int, ...], None]()
    rows, heads = based.target.rows, list(off)
    for each in estimates:
        order = np.argsort(-np.abs(each), axis=None, kind="stable")[:_ESTIMATED]
        for layer, head, row, key in np.transpose(np.unravel_index(order, each.shape)).tolist():
            if each[layer, head, row, key]:
                chosen[layer, head, rows[row], key] = None
    changes = np.array([np.append(one.value - again.value, (one.odds - based.odds)[1:]) for one in off.values()])
    order = np.argsort(-np.abs(changes), axis=0, kind="stable")
    for row, query in enumerate(rows):
        most, count = (min(again.listed, _LATER // len(rows)), 1) if row else (_HEADS, _KEYS)
        for layer, head in (heads[place] for place in order[:most, row].tolist()):
            weights = based.weights(layer, query)[head]
            keys = [key for key in np.argsort(-weights)[: count + 1].tolist() if key or again.rest != "first"]
            chosen |= {(layer, head, query, key): None for key in keys[:count] if weights[key]}
    made = []
    runs = rerun.without(again.model, again.based, list(chosen), again.rest)
    for edge, one in zip(chosen, runs, strict=True):
        layer, head, query, key = edge
        weight, now = float(based.weights(layer, query)[head, key]), again.changed(one)
        made.append(EdgeEffect(layer, head, query, key, weight, now["hidden"], now["share"]))
    return sorted(made, key=lambda edge: -abs(edge.truth)), dict(zip(chosen, runs, strict=True))
