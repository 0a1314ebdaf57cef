"""Runs a text through a model and shows one token's attention in one head step by step, for `Explanation.steps`."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from clearhead.core.axes import Array, group_size
from clearhead.core.rule_values import is_whole, whole_number
from clearhead.core.rules import FIELDS, take
from clearhead.errors import SelectionError, shown
from clearhead.explaining.attribution import ways
from clearhead.explaining.head_steps import HeadSteps, steps_of
from clearhead.explaining.rerun import forward_pass, resting, without_heads
from clearhead.explaining.texts import continued, find_token, read
from clearhead.models.model import Model
from clearhead.models.protocol import ForwardPass, LanguageModel, LayerRun, layer_numbers, next_tokens
from clearhead.models.tokenizer import Reading
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.span_terms import SpanTerm
from clearhead.textbook.trace import Trace, trace


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

    text          a text, or a list of messages: {"role": "system", "user" or "assistant", "content": a string}
    model         a path or name, as `load_model` takes it, or a loaded model; None: the small model that ships with
                  clearhead, trained on nursery rhymes, for illustration
    layer, head   from 0; None: the head that did most for the likeliest token after the chosen one. To find it, the
                  model is run again without each head (in PyTorch, without the eight with the largest derivatives); a
                  model that predicts no next token takes the head whose row has the least entropy
    token         a position (negative counts from the end) or a word of the text; None: the last
    count         how many next tokens to list
    generate      how many tokens to generate first, each the likeliest; then the longer text is explained
    each          iterates over the model's layers, such as a progress bar

    Returns a HeadSteps: tokens, next (after the text) and after (the chosen token), steps (each intermediate's shape
    and formula), trace (the chosen head with its numbers in float64, (queries, keys) and (queries, d_v)), row (the
    chosen token alone), entropy (layers, heads) in nats; `heads()` says in a sentence what each head does; `save`,
    `to_html`, `to_json`. A notebook shows its tables.
    Raises DtypeError for a text or model of another type, SelectionError for an unknown layer, head or token, RuleError
    for counts that are not whole numbers, ShapeError for an empty text or one that is too long, FileError for a model
    that cannot be read, MissingExtraError if it needs Transformers. The forward pass takes O(tokens²·d_model +
    tokens·d_model²) for each layer; the chosen head's numbers take O(tokens²) memory.

    >>> seen = steps_of_text("humpty dumpty sat on")
    >>> seen.next[0].text, seen.trace.weights.shape
    (' a', (4, 4))
    """
    from clearhead.models.finding import load_model

    loaded, count = load_model(model), whole_number("count", count, 0)
    more = whole_number("generate", generate, 0)
    reading = read(loaded, text)
    said = loaded.generate([token.id for token in reading.tokens], more) if more else []
    reading = continued(loaded, Reading(reading.text, reading.tokens, []), said)
    place = find_token(reading.tokens, reading.text, token)
    numbers, asked = layer_numbers(loaded), places_of(loaded, layer, head)
    run = forward_pass(loaded, reading.tokens, each)
    entropy = entropy_of(run, place)
    number, head_of_it, change = _chosen(loaded, run, place, entropy, asked)
    chosen = run.layers[number]
    if head is not None and head >= len(chosen.q):
        raise SelectionError(f"head {head} is outside 0..{len(chosen.q) - 1} of layer {numbers[number]}.")
    traced = trace_of_head(chosen, head_of_it)
    choices = [] if run.logits is None else [next_tokens(loaded, row, max(1, count)) for row in run.logits]
    after = choices[place] if choices else []
    return HeadSteps(
        model=loaded,
        text=reading.text,
        tokens=reading.tokens,
        next=choices[-1][:count] if choices else [],
        after=after[:count],
        layer=numbers[number],
        head=head_of_it,
        chosen=(layer is None, head is None),
        token=place,
        run=chosen,
        runs=run.layers,
        steps=steps_of(chosen),
        trace=traced,
        row=traced.token(place),
        entropy=entropy,
        sinks=resting(run, place),
        change=change,
        generated=more,
        following=[choice[:count] for choice in choices],
        logits=None if run.logits is None else run.logits[-1],
        ways=ways(loaded, run, place, after) if isinstance(loaded, Model) else [],  # only here do the parts add up
    )


def places_of(model: LanguageModel, layer: int | None, head: int | None) -> tuple[int | None, int | None]:
    """Return a layer's and a head's places in the model's runs. Raises SelectionError if there are none."""
    return _place_of("layer", layer, layer_numbers(model)), _place_of("head", head, range(model.config.heads))


def _place_of(name: str, value: int | None, known: Sequence[int]) -> int | None:
    """Return the place of a layer or head among those that attend. Raises SelectionError if there is none."""
    if value is None or (is_whole(value) and value in known):
        return None if value is None else known.index(value)
    if is_whole(value) and 0 <= value < known[-1]:
        raise SelectionError(f"layer {value} has no attention: layers {', '.join(map(str, known))} have.")
    raise SelectionError(f"{name} {shown(value)} is outside 0..{known[-1]}: the model has {len(known)} {name}s.")


def _chosen(
    model: LanguageModel, run: ForwardPass, row: int, entropy: Array, asked: tuple[int | None, int | None]
) -> tuple[int, int, float | None]:
    """Choose layer and head: those asked for, or those that did most; return also the log-odds' change without it."""
    changes, numbers = None, entropy
    if asked[0] is not None and asked[1] is not None:
        return asked[0], asked[1], None
    if run.logits is not None and entropy.size > 1:
        changes = without_heads(model, run, row)
        numbers = -np.nan_to_num(np.abs(changes), nan=-1.0)
    places = tuple(slice(None) if each is None else each for each in asked)
    allowed = np.full(numbers.shape, np.inf)
    allowed[places] = numbers[places]
    layer, head = (int(each) for each in np.unravel_index(int(allowed.argmin()), numbers.shape))
    return layer, head, None if changes is None else float(changes[layer, head])


def entropy_of(run: ForwardPass, token: int) -> Array:
    """Return the entropy of one token's row, float64 (layers, heads)."""
    rows = [
        AttentionMatrix(layer.q, layer.k, **layer.rules).observe(entropy=True, queries=slice(token, token + 1))
        for layer in run.layers
    ]
    made = np.full((len(rows), max(len(layer.q) for layer in run.layers)), np.inf)  # a layer may have fewer heads
    for layer, row in enumerate(rows):
        made[layer, : len(row.entropy)] = np.asarray(row.entropy, dtype=np.float64)[:, 0]
    return made


def trace_of_head(layer: LayerRun, head: int) -> Trace:
    """Trace one head of a layer as 2-D arrays; its rules have no axes for the batch and the heads."""
    shared = head // group_size(len(layer.q), len(layer.k))
    plain = {name: x for name, x in layer.rules.items() if name != "spans"}
    arrays = {name: np.asarray(x) for name, x in plain.items() if np.ndim(x) and FIELDS[name]}
    arrays = {name: x[(None,) * (len(FIELDS[name]) - x.ndim)] for name, x in arrays.items()}
    one = take(arrays, {"batch": [0], "heads": [head]})
    lead = {name: sum(axis in ("batch", "heads") for axis in FIELDS[name]) for name in one}
    plain |= {name: x.reshape(x.shape[lead[name] :]) for name, x in one.items()}
    if layer.rules.get("spans") is not None:
        term = SpanTerm.of(layer.rules["spans"])
        table = np.asarray(term.table)[0]
        plain["spans"] = term.query_labels[0], term.key_labels[0], table[head if len(table) > 1 else 0]
    return trace(layer.q[head], layer.k[shared], layer.v[shared], **plain)
