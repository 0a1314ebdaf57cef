"""What is shown as a cause, run again: parts of the text hidden, heads off in the rows that answer, edges without."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple, TypeVar

import numpy as np

from clearhead.core.axes import Array, group_size
from clearhead.core.effects import Rest
from clearhead.explaining.answers import Target
from clearhead.models.protocol import Each, ForwardPass, LanguageModel, Variant
from clearhead.ops.matrix import AttentionMatrix

Place = TypeVar("Place", bound=tuple[int, ...])  # a layer first
_FIRST, _ANSWER = 8, 32  # heads that a model in PyTorch runs; tokens of an answer of which all heads are run
_NEUTRAL = (
    "It was a quiet morning, and the people of the town went about their work as they did on every day of the week."
)


class EdgePlace(NamedTuple):
    """One weight of one head: query `query` attends to key `key`."""

    layer: int
    head: int
    query: int
    key: int


class Based(NamedTuple):
    """A target with its run, its number there, and the run's `row_weights`, each computed once.

    each   iterates over layers, or variants, of what is run again, such as a progress bar
    """

    target: Target
    run: ForwardPass
    value: float
    weights: Callable[[int, int], Array]
    each: Each = iter
    tokens: Sequence[int] = ()  # whose logits are kept of what is run again


class Rerun(NamedTuple):
    """A variant of the run: the number, and what is kept of the logits of the answer's first token."""

    value: float
    logits: dict[int, float]  # of `Based.tokens` and of the likeliest
    likeliest: int
    logsumexp: float  # of all logits
    odds: Array  # of each of the answer's tokens, in natural logarithms

    def share(self, token: int) -> float:
        """The probability of one of these tokens."""
        return float(np.exp(self.logits[token] - self.logsumexp))


def based_on(target: Target, run: ForwardPass, each: Each = iter, tokens: Sequence[int] = ()) -> Based:
    """A target in its run; the logits of these tokens and of the likeliest ones are kept of what is run again."""
    logits = np.stack([np.asarray(run.logits[row]) for row in target.rows])
    kept = *tokens, *likely(logits[0]).tolist()
    value = target.number(logits, target.odds_of_each(logits))
    return Based(target, run, value, cache(partial(row_weights, run)), each, kept)


def likely(logits: Array) -> Array:
    """The five likeliest next tokens, (…, 5), of logits (…, vocabulary)."""
    return np.argsort(-logits, axis=-1, kind="stable")[..., :5]


def hidden(
    model: LanguageModel,
    based: Sequence[Based],
    parts: Sequence[Sequence[int]],
    factors: Sequence[float] | None = None,
) -> list[Rerun]:
    """Runs in which later tokens see the keys of each list times a factor, or not at all.

    Most heads rest on the first token, and without it no text makes sense. So it is not hidden: the model's neutral
    token stands in its place.
    """
    pairs = list(zip(parts, factors or [0.0] * len(parts), strict=True))
    beginning = any(0 in keys and not factor for keys, factor in pairs)
    neutral = {0: model.tokenizer.neutral} if beginning else {}

    def variant(keys: Sequence[int], factor: float, tokens: int) -> Variant:
        gates = np.zeros(tokens)
        gates[[key for key in keys if key or factor]] = np.log(factor) if factor else -np.inf
        replaced = neutral if 0 in keys and not factor else {}
        return Variant(gates if gates.any() else None, min(keys, default=0), ids=replaced)

    return _summed(model, based, [[variant(*pair, len(each.target.ids)) for pair in pairs] for each in based])


def heads_off(model: LanguageModel, based: Sequence[Based], heads: Sequence[tuple[int, int]]) -> list[Rerun]:
    """Runs in which one head's output is 0 in the rows that say the answer."""

    def variant(each: Based, place: tuple[int, int]) -> Variant:
        rows, (layer, head) = each.target.rows, place
        ran, first = each.run.attended(layer, rows.start)
        output = ran.heads[head, first : first + len(rows)]
        return Variant(None, rows.start, {place: -output})

    return _summed(model, based, [_by_layer(partial(variant, each), heads) for each in based])


def anywhere(model: LanguageModel, heads: Sequence[tuple[int, int]]) -> list[float]:
    """What ln p of a token in the second half of a neutral text changes by, on average, without each head there."""
    ids = model.tokenizer.encoder.encode(_NEUTRAL).ids[: model.tokenizer.positions]
    count = len(ids) // 2
    target = Target(ids[:-1], tuple(ids[-count:]), None, odds=False)
    based = based_on(target, model.run(target.ids))
    return [(one.value - based.value) / count for one in heads_off(model, [based], heads)]


def edges_without(
    model: LanguageModel,
    based: Sequence[Based],
    edges: Sequence[EdgePlace],
    rest: Rest = "first",
) -> list[Rerun]:
    """Runs without one edge of a row that says the answer.

    rest   "first": its weight goes to the first token, where idle heads rest; "renormalise": to all others by theirs

    An edge of a row that one target's run does not share leaves that run as it is.
    """
    return _summed(model, based, [_by_layer(partial(_without, each, rest), edges) for each in based])


def _by_layer(variant: Callable[[Place], Variant], places: Sequence[Place]) -> list[Variant]:
    """The variant of each place; made layer by layer, since of a long text each layer is computed again."""
    made = {place: variant(place) for place in sorted(places)}
    return [made[place] for place in places]


def each_off(model: LanguageModel, based: Sequence[Based], effects: Array, count: int) -> dict[tuple[int, int], Rerun]:
    """Runs without each head in the rows that answer, by layer and head.

    A model in PyTorch, and of a long answer any, runs only the `count` heads of the largest effects, (layers, heads).
    """
    all_run = model.config.shares_runs and sum(len(one.target.rows) for one in based) <= _ANSWER
    order = np.argsort(-np.abs(effects), axis=None, kind="stable").tolist()
    chosen = [divmod(place, effects.shape[1]) for place in (order if all_run else order[:count])]
    return dict(zip(chosen, heads_off(model, based, chosen), strict=True))


def changes_of(runs: dict[tuple[int, int], Rerun], value: float, shape: tuple[int, ...]) -> Array:
    """What the number changes by in each run, (layers, heads); NaN where there is none."""
    changes = np.full(shape, np.nan)
    for place, one in runs.items():
        changes[place] = one.value - value
    return changes


def without_heads(model: LanguageModel, run: ForwardPass, row: int) -> Array:
    """What the logit of the likeliest next token's probability changes by without each head in a row, (layers, heads).

    NaN for heads that were not run: of models in PyTorch all but the eight with the largest derivatives.
    """
    target = Target(list(run.ids[: row + 1]), (int(np.argmax(run.logits[row])),), None, odds=True)
    first = np.zeros((model.config.layers, model.config.heads))
    if not model.config.shares_runs:
        variant, some = Variant(), range(row, row + 1)
        for layer, _, part in model.differentiated(list(run.ids), [variant], some, lambda rows: target.value(rows)[1]):
            first[layer] = np.einsum("hd,hd->h", part.g[:, row], part.output[:, row])
    based = based_on(target, run)
    return changes_of(each_off(model, [based], first, _FIRST), based.value, first.shape)


def resting(run: ForwardPass, row: int) -> int:
    """How many heads give the first token over half of a row's weight."""
    return int(sum((row_weights(run, layer, row)[:, 0] > 0.5).sum() for layer in range(len(run.layers))))


def row_weights(run: ForwardPass, layer: int, row: int) -> Array:
    """The weights of one row of a layer, float64 (heads, keys)."""
    ran, place = run.attended(layer, row)
    return np.asarray(AttentionMatrix(ran.q, ran.k, **ran.rules)[:, place], np.float64)


def _without(based: Based, rest: Rest, edge: EdgePlace) -> Variant:
    run, rows = based.run, based.target.rows
    ran, row = run.attended(edge.layer, edge.query)
    place = edge.layer, edge.head
    if edge.query not in rows or (edge.query > rows.start and based.target.sign < 0):
        return Variant(None, rows.stop - 1, {place: np.zeros((1, ran.heads.shape[-1]), ran.heads.dtype)})
    values = ran.v[edge.head // group_size(len(ran.q), len(ran.v))]
    weight = float(based.weights(edge.layer, edge.query)[edge.head, edge.key])
    if rest == "first":
        other = np.zeros_like(values[0]) if ran.rules.get("sinks") is not None else values[0]
        moved = weight * (other - values[edge.key])
    else:
        output = ran.heads[edge.head, row]
        moved = weight / (1 - weight) * (output - values[edge.key]) if weight < 1 else -output
    return Variant(None, edge.query, {place: moved[None].astype(values.dtype)})


def _summed(model: LanguageModel, based: Sequence[Based], variants: Sequence[Sequence[Variant]]) -> list[Rerun]:
    """The number in each variant, all targets together, and the logits after the text."""
    made: list[Rerun] = []
    for one, chosen in zip(based, variants, strict=True):
        for place, rows in enumerate(model.again(one.run, chosen, one.target.rows, one.each)):
            odds = one.target.odds_of_each(rows)
            value = one.target.number(rows, odds)
            if place < len(made):
                made[place] = made[place]._replace(value=made[place].value + value)
            else:
                made.append(kept(one, value, rows, odds))
    return made


def kept(based: Based, value: float, rows: Array, odds: Array) -> Rerun:
    """What is kept of the logits of the target's rows, (rows, vocabulary), and of its tokens' odds."""
    first, likeliest = np.asarray(rows[0], np.float64), int(np.argmax(rows[0]))
    logits = {token: float(first[token]) for token in (likeliest, *based.tokens)}
    return Rerun(value, logits, likeliest, float(np.logaddexp.reduce(first)), odds)
