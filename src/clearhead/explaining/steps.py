"""`ch.explain`: a text is run through a model, and one token's attention in one head is shown step by step."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array, group_size
from clearhead.core.rule_values import is_whole, whole_number
from clearhead.core.rules import FIELDS, take
from clearhead.errors import SelectionError, shown
from clearhead.explaining.attribution import Way, ways
from clearhead.explaining.head_steps import HeadSteps, steps_of
from clearhead.explaining.rerun import forward_pass, resting, without_heads
from clearhead.explaining.texts import Reading, find_token, read
from clearhead.models.model import Model
from clearhead.models.protocol import Each, ForwardPass, LanguageModel, Token, next_tokens
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.span_terms import SpanTerm
from clearhead.textbook.trace import trace


def steps_of_text(
    text: Any,
    model: "str | os.PathLike[str] | LanguageModel | None" = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    token: int | str | None = None,
    count: int = 5,
    generate: int = 0,
    each: Callable[[range], Iterable[int]] = iter,
) -> HeadSteps:
    """Run `text` through a model and show one token's attention step by step, as `clearhead explain --steps` does.

    text          a text, or a list of messages: {"role": "system", "user" or "assistant", "content": a text}
    model         a path or a name, as `load_model` takes them, or a loaded model; None is the small one that ships with
                  clearhead, trained on nursery rhymes, for illustration
    layer, head   from 0; None takes the one that did most for the likeliest token after the chosen one: the model is
                  run again without each head there (of models in PyTorch, without the eight that by their derivatives
                  bring most), or in a model that says no next token the one whose row has the least entropy
    token         a position (negative counts from the end) or a word of the text; None is the last
    count         how many next tokens to list
    generate      how many tokens to put after the text first, each the likeliest; then all of it is explained
    each          iterates over the model's layers, such as a progress bar

    Returns an HeadSteps: tokens, next (after the text) and after (the chosen token), steps (each intermediate's shape
    and formula), trace (the chosen head with its numbers in float64, (queries, keys) and (queries, d_v)), row (the
    chosen token alone), entropy (layers, heads) in nats; `heads()` says in a sentence what each head does; `save`,
    `to_html`, `to_json`. In a notebook it is shown as its page.
    Raises DtypeError for a text or model of another type, SelectionError for an unknown layer, head or token, RuleError
    for counts that are no whole numbers, ShapeError for an empty text or one that is too long, FileError for a model
    that cannot be read, MissingExtraError where it needs Transformers. The forward pass takes O(tokens²·d_model +
    tokens·d_model²) for each layer; the chosen head's numbers take O(tokens²) memory.

    >>> seen = steps_of_text("humpty dumpty sat on")
    >>> seen.next[0].text, seen.trace.weights.shape
    (' a', (4, 4))
    """
    from clearhead.models.finding import load_model

    loaded, count = load_model(model), whole_number("count", count, 0)
    more = whole_number("generate", generate, 0)
    reading = read(loaded, text)
    tokens = continued(loaded, reading.tokens, more)
    whole = reading.text + "".join(token.text for token in tokens[len(tokens) - more :])
    part, asked = Reading(whole, tokens, []), _Asked(layer, head, find_token(tokens, whole, token), count)
    return replace(_explained(loaded, part, asked, each), generated=more)


def continued(model: LanguageModel, tokens: list[Token], count: int) -> list[Token]:
    """The tokens and the `count` that the model puts after them, each the likeliest after all before it (greedy).

    Their `start` and `stop` go on where the text ends. Raises ShapeError where the model has too few positions,
    RuleError for a model that says no next token.
    """
    more = list(tokens)
    for token in model.generate([token.id for token in tokens], count) if count else ():
        text, end = model.tokenizer.text(token), more[-1].stop
        more.append(Token(token, text, end, end + len(text)))
    return more


class _Asked(NamedTuple):
    """The layer and head to explain, None where they are to be chosen; the token; how many next tokens."""

    layer: int | None
    head: int | None
    token: int
    most: int


def _explained(model: LanguageModel, part: Reading, asked: _Asked, each: Each) -> HeadSteps:
    """One run, and the head that did most where layer and head are not chosen."""
    for name, value in (("layer", asked.layer), ("head", asked.head)):
        size = getattr(model.config, f"{name}s")
        if value is not None and (not is_whole(value) or not 0 <= value < size):
            where = f"{name} {shown(value)} is outside 0..{size - 1}"
            raise SelectionError(f"{where}: the model has {size} {name}s.")
    run = forward_pass(model, part.tokens, each)
    entropy, changes = entropy_of(run, asked.token), None
    numbers = entropy
    if None in (asked.layer, asked.head) and run.logits is not None and entropy.size > 1:
        changes = without_heads(model, run, asked.token)
        numbers = -np.nan_to_num(np.abs(changes), nan=-1.0)
    place = _least(numbers, asked)
    made = _explanation(model, part, asked, run, entropy, place)
    return made if changes is None else replace(made, change=float(changes[place]))


def _explanation(
    model: LanguageModel, part: Reading, asked: _Asked, run: ForwardPass, entropy: Array, place: tuple[int, int]
) -> HeadSteps:
    (layer, head), to_each = place, list[Way]()
    chosen = run.layers[layer]
    shared = head // group_size(len(chosen.q), len(chosen.k))
    steps = trace(chosen.q[head], chosen.k[shared], chosen.v[shared], **rules_of_head(chosen.rules, head))
    choices = [] if run.logits is None else [next_tokens(model, row, max(1, asked.most)) for row in run.logits]
    after = choices[asked.token] if choices else []
    if isinstance(model, Model):  # whose parts add up
        to_each = ways(model, run, asked.token, after)
    return HeadSteps(
        model=model,
        text=part.text,
        tokens=part.tokens,
        next=choices[-1][: asked.most] if choices else [],
        after=after[: asked.most],
        layer=layer,
        head=head,
        chosen=(asked.layer is None, asked.head is None),
        token=asked.token,
        run=chosen,
        runs=run.layers,
        steps=steps_of(chosen),
        trace=steps,
        row=steps.token(asked.token),
        entropy=entropy,
        sinks=resting(run, asked.token),
        following=[choice[: asked.most] for choice in choices],
        logits=None if run.logits is None else run.logits[-1],
        ways=to_each,
    )


def _least(numbers: Array, asked: _Asked) -> tuple[int, int]:
    """The place of the least of (layers, heads) numbers, in the layer and of the head that were asked for."""
    places = tuple(slice(None) if each is None else each for each in (asked.layer, asked.head))
    allowed = np.full(numbers.shape, np.inf)
    allowed[places] = numbers[places]
    layer, head = np.unravel_index(int(allowed.argmin()), numbers.shape)
    return int(layer), int(head)


def entropy_of(run: ForwardPass, token: int) -> Array:
    """The entropy of one token's row, float64 (layers, heads)."""
    rows = [
        AttentionMatrix(layer.q, layer.k, **layer.rules).observe(entropy=True, queries=slice(token, token + 1))
        for layer in run.layers
    ]
    return np.stack([np.asarray(row.entropy, dtype=np.float64)[:, 0] for row in rows])


def rules_of_head(rules: dict[str, Any], head: int) -> dict[str, Any]:
    """The rules of one head of the first text, without an axis for either: for 2-D arrays."""
    plain = {name: x for name, x in rules.items() if name != "spans"}
    arrays = {name: np.asarray(x) for name, x in plain.items() if np.ndim(x) and FIELDS[name]}
    one = take(arrays, {"batch": [0], "heads": [head]})
    lead = {name: sum(axis in ("batch", "heads") for axis in FIELDS[name]) for name in one}
    plain |= {name: x.reshape(x.shape[lead[name] :]) for name, x in one.items()}
    if rules.get("spans") is None:
        return plain
    term = SpanTerm.of(rules["spans"])
    table = np.asarray(term.table)[0]
    return plain | {"spans": (term.query_labels[0], term.key_labels[0], table[head if len(table) > 1 else 0])}
