"""Runs a model again without a cause: with parts of the text hidden, or heads or edges off in the rows that answer."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array, group_size
from clearhead.core.effects import Rest
from clearhead.errors import FileError
from clearhead.explaining.answers import Target
from clearhead.models.protocol import Choice, Each, ForwardPass, LanguageModel, Token, Variant
from clearhead.ops.matrix import AttentionMatrix

_FIRST, _ANSWER = 8, 32  # heads that are run in PyTorch; the longest answer, in tokens, for which all heads are run


class PartEffect(NamedTuple):
    """A part of the text, its characters, and its effect on the number y.

    effect   its effect together with the other parts, from all runs: above 0 if it speaks for the answer; the effects
             of all parts add up to total − gap
    replaced the token that replaces the text's first token in runs without this part; "" for parts without that token
    hidden   the change of y in a run in which no later token sees the part; None if it was not run
    share    the answer's probability in that run; if two answers are compared, that of its first token
    likeliest   the likeliest next token in that run
    begins   does that token only begin a word, as " Mont" does? Known for the parts on the screen
    """

    text: str
    start: int
    stop: int
    tokens: tuple[int, ...]
    effect: float
    replaced: str = ""
    hidden: float | None = None
    share: float | None = None
    likeliest: Choice | None = None
    begins: bool = False


class PairEffect(NamedTuple):
    """Two parts that stand in for each other: hiding both changes y much more than the two single changes together.

    hidden, share, likeliest   as in PartEffect, for a run without both
    """

    first: PartEffect
    second: PartEffect
    hidden: float
    share: float
    likeliest: Choice


class EdgeEffect(NamedTuple):
    """One edge of a row that answers: its weight, and the change of y in a run without it."""

    layer: int
    head: int
    query: int
    key: int
    weight: float
    truth: float
    share: float  # the probability of the answer's first token in that run


class HeadEffect(NamedTuple):
    """One head, and the change of y in a run with the head off in the rows that answer.

    anywhere   the change of ln P of as many tokens of a neutral text, with the head off there
    edge       its strongest edge among those that were run again, or None
    """

    layer: int
    head: int
    truth: float
    anywhere: float = 0.0
    edge: EdgeEffect | None = None

    @property
    def needed(self) -> bool:
        """Does a neutral text lose at least half as much without the head? If so, any text needs it."""
        return 2 * self.anywhere <= self.truth < 0


def by_change(parts: Sequence[PartEffect]) -> list[PartEffect]:
    """Sort parts by how much hiding each changes the answer; parts that were not run follow, by their effects."""
    return sorted(parts, key=lambda one: (one.hidden is None, -abs(one.effect if one.hidden is None else one.hidden)))


def plain(value: Any) -> Any:
    """Turn a result, and the results in it, into dictionaries."""
    return {key: plain(x) for key, x in value._asdict().items()} if hasattr(value, "_asdict") else value


class Based(NamedTuple):
    """A target with its base run, y and the answer's odds in it, and a cache of the run's `row_weights`.

    each   iterates over layers, or variants, of later runs, such as a progress bar
    """

    target: Target
    run: ForwardPass
    value: float
    odds: Array
    weights: Callable[[int, int], Array]
    each: Each = iter
    tokens: Sequence[int] = ()  # later runs keep the logits of these


class Rerun(NamedTuple):
    """The result of one variant: y, and some logits of the row that predicts the answer's first token."""

    value: float
    logits: dict[int, float]  # of `Based.tokens` and of the likeliest
    likeliest: int
    logsumexp: float  # of all logits
    odds: Array  # of each of the answer's tokens, in natural logarithms


def forward_pass(model: LanguageModel, tokens: list[Token], each: Each) -> ForwardPass:
    """Run the model. Raises FileError if a result is NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        run = model.run([token.id for token in tokens], each)
    finite = bool(run.hidden and np.isfinite(run.hidden[-1]).all())  # NaN and infinity stay in the stream to its end
    for number in range(0 if finite else len(run.layers)):
        layer = run.layers[number]  # with a residual stream, everything in the layer reaches the stream
        arrays = [run.hidden[number + 1]] if run.hidden else [layer.x, layer.q, layer.k, layer.v, layer.output]
        if not all(np.isfinite(array).all() for array in arrays):
            raise FileError(
                f"{model.name}: layer {number} gives NaN or infinity: its weights are damaged, or too large."
            )
    with np.errstate(over="ignore", invalid="ignore"):
        finite = run.logits is None or bool(np.isfinite(run.logits[-1]).all())
    if not finite:
        raise FileError(f"{model.name}: its logits are NaN or infinite: its weights are damaged, or too large.")
    return run


def based_on(target: Target, run: ForwardPass, each: Each = iter, tokens: Sequence[int] = ()) -> Based:
    """Pair a target with its base run; later runs keep the logits of `tokens` and of the likeliest tokens."""
    logits = np.asarray(run.logits[target.rows.start : target.rows.stop])
    odds, kept = target.odds_of_each(logits), (*tokens, *likely(logits[0]).tolist())
    return Based(target, run, target.number(logits, odds), odds, cache(partial(row_weights, run)), each, kept)


def likely(logits: Array) -> Array:
    """Return the five likeliest next tokens, (…, 5), from logits (…, vocabulary)."""
    return np.argsort(-logits, axis=-1, kind="stable")[..., :5]


def hidden(model: LanguageModel, based: Sequence[Based], parts: Sequence[tuple[Sequence[int], float]]) -> list[Rerun]:
    """Run the model with the weights on each list's keys times a factor in later rows; 0 hides them.

    Most heads rest on the first token, and without it no text makes sense to the model. So it is not hidden but
    replaced by the model's neutral token.
    """
    variants: list[list[Variant]] = [[] for _ in based]
    for (keys, factor), (one, made) in product(parts, zip(based, variants, strict=True)):
        gates = np.zeros(len(one.target.ids))
        gates[[key for key in keys if key or factor]] = np.log(factor) if factor else -np.inf
        replaced = {0: model.tokenizer.neutral} if 0 in keys and not factor else {}
        made.append(Variant(gates if gates.any() else None, min(keys, default=0), ids=replaced))
    return _summed(model, based, variants)


def without(
    model: LanguageModel, based: Sequence[Based], places: Sequence[tuple[int, ...]], rest: Rest = "first"
) -> list[Rerun]:
    """Run the model without a head (its output is 0 in the rows that predict the answer), or without an edge there.

    places   (layer, head) for a head; (layer, head, query, key) for an edge, a query's weight on a key
    rest     where an edge's weight goes: "first": to the first token, where idle heads rest; "renormalise": to all
             other keys in proportion to their weights

    An edge of a row that one target's run does not share leaves that run unchanged.
    """
    variants = []
    for one in based:
        made = {place: _less(one, rest, *place) for place in sorted(places)}  # of a long text layer by layer
        variants.append([made[place] for place in places])
    return _summed(model, based, variants)


def each_off(
    model: LanguageModel, based: Sequence[Based], effects: Array, count: int
) -> tuple[Array, dict[tuple[int, int], Rerun]]:
    """Turn each head off in the rows that answer; return the changes of y, NaN if not run, and the runs.

    In PyTorch, or for a long answer, only the `count` heads with the largest `effects`, (layers, heads), are run.
    """
    all_run = model.config.shares_runs and sum(len(one.target.rows) for one in based) <= _ANSWER
    order = np.argsort(-np.abs(effects), axis=None, kind="stable").tolist()
    chosen = [divmod(place, effects.shape[1]) for place in order]
    if not all_run:
        heads = [len(layer.q) for layer in based[0].run.layers]  # a layer may have fewer than others
        chosen = [place for place in chosen if place[1] < heads[place[0]]][:count]
    runs, changes = without(model, based, chosen), np.full(effects.shape, np.nan)
    changes[tuple(np.transpose(chosen))] = [one.value - sum(each.value for each in based) for one in runs]
    return changes, dict(zip(chosen, runs, strict=True))


def without_heads(model: LanguageModel, run: ForwardPass, row: int) -> Array:
    """Return the change of the likeliest next token's log-odds without each head in a row, (layers, heads).

    It is NaN for heads that were not run: in PyTorch, all but the eight with the largest derivatives.
    """
    target = Target(list(run.ids[: row + 1]), (int(np.argmax(run.logits[row])),), None, odds=True)
    first = np.zeros((model.config.layers, model.config.heads))
    if not model.config.shares_runs:
        variant, some = Variant(), range(row, row + 1)
        for layer, _, part in model.differentiated(list(run.ids), [variant], some, lambda rows: target.value(rows)[1]):
            first[layer, : len(part.g)] = np.einsum("hd,hd->h", part.g[:, row], part.output[:, row])
    return each_off(model, [based_on(target, run)], first, _FIRST)[0]


def resting(run: ForwardPass, row: int) -> int:
    """Count the heads with over half of a row's weight on the first token."""
    return int(sum((row_weights(run, layer, row)[:, 0] > 0.5).sum() for layer in range(len(run.layers))))


def row_weights(run: ForwardPass, layer: int, row: int) -> Array:
    """Return the weights of one row of a layer, float64 (heads, keys)."""
    ran, place = run.attended(layer, row)
    return np.asarray(AttentionMatrix(ran.q, ran.k, **ran.rules)[:, place], np.float64)


def _less(based: Based, rest: Rest, layer: int, head: int, query: int | None = None, key: int = 0) -> Variant:
    """Make the variant without one head, or without one of its edges."""
    run, rows = based.run, based.target.rows
    start, size = (rows.start, len(rows)) if query is None else (query, 1)
    ran, row = run.attended(layer, start)
    output = ran.heads[head, row : row + size]
    moved = -output
    if query is not None and (query >= rows.stop or (query > rows.start and based.target.sign < 0)):
        start, moved = rows.stop - 1, np.zeros_like(output)
    elif query is not None:
        values = ran.v[head // group_size(len(ran.q), len(ran.v))]
        weight = float(based.weights(layer, query)[head, key])
        if rest == "first":
            other = np.zeros_like(values[0]) if ran.rules.get("sinks") is not None else values[0]
            moved = weight * (other - values[key])[None]
        elif weight < 1:
            moved = weight / (1 - weight) * (output - values[key])
    return Variant(None, start, {(layer, head): moved.astype(output.dtype)})


def _summed(model: LanguageModel, based: Sequence[Based], variants: Sequence[Sequence[Variant]]) -> list[Rerun]:
    """Run variants; sum y over the targets, and keep some logits after the text."""
    made: list[Rerun] = []
    for one, chosen in zip(based, variants, strict=True):
        for place, rows in enumerate(model.again(one.run, chosen, one.target.rows, one.each)):
            odds = one.target.odds_of_each(rows)
            value = one.target.number(rows, odds)
            if place < len(made):
                made[place] = made[place]._replace(value=made[place].value + value)
            else:
                likeliest, said = int(np.argmax(rows[0])), one.target.answer[0]
                logits = {token: float(rows[0, token]) for token in (likeliest, *one.tokens)}
                total = float(rows[0, said] + np.logaddexp(0.0, -odds[0]))  # since ln P is the logit minus the total
                made.append(Rerun(value, logits, likeliest, total, odds))
    return made
