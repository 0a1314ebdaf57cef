"""A model's forward pass, checked: with its residual stream, with one head as a small problem, or with every head."""

from pathlib import Path
from typing import Any, cast

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.rules import FIELDS, Rules, take
from clearhead.errors import FileError, RuleError, expected
from clearhead.models.protocol import Each, ForwardPass, LanguageModel, LayerRun, Token, next_tokens
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.span_terms import SpanTerm
from clearhead.textbook.page import Translations, both, capitalised
from clearhead.textbook.shapes import Sizes, Steps, layer_steps
from clearhead.view.long import ShownLayer, ShownRun
from clearhead.words import LANGUAGES, say


def check_each(each: Each) -> None:
    """Raise RuleError for an `each` that cannot be called."""
    if not callable(each):
        raise RuleError(expected("each", each, "what walks the layers"), "each=tqdm")


def forward_pass(model: LanguageModel, tokens: list[Token], each: Each) -> ForwardPass:
    """The forward pass. Raises FileError where it gives NaN or infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        run = model.run([token.id for token in tokens], each)
    finite = bool(run.hidden and np.isfinite(run.hidden[-1]).all())  # NaN and infinity stay in it to its end
    for number in range(0 if finite else len(run.layers)):
        layer = run.layers[number]  # where it has the residual stream, everything in the layer reaches that
        arrays = [run.hidden[number + 1]] if run.hidden else [layer.x, layer.q, layer.k, layer.v, layer.output]
        if not all(np.isfinite(array).all() for array in arrays):
            raise FileError(
                f"{model.name}: layer {number} gives NaN or infinity: its weights are damaged, or too large."
            )
    with np.errstate(over="ignore", invalid="ignore"):
        finite = run.logits is None or all(np.isfinite(row).all() for row in run.logits)
    if not finite:
        raise FileError(f"{model.name}: its logits are NaN or infinite: its weights are damaged, or too large.")
    return run


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


def model_line(model: LanguageModel) -> Translations:
    """What a page says of the model."""
    place, sizes = Path(model.name), {name: getattr(model.config, name) for name in ("layers", "heads", "d_model")}
    return both("model", name=place.resolve().name if place.is_dir() else model.name, **sizes)


def steps_of(run: LayerRun) -> Steps:
    """The steps of a whole layer, all heads, without numbers."""
    (heads, n, d_k), (kv_heads, m, d_v) = run.q.shape, run.v.shape
    sizes = Sizes((), heads, kv_heads, n, m, d_k, d_v, itemsize=run.x.itemsize)
    widths, rules = (run.x.shape[-1], None, run.output.shape[-1]), cast("Rules", run.rules)
    return layer_steps(sizes, *widths, rules, run.biases, run.through, normalised=run.normalised)


def shown_run(model: LanguageModel, text: str, each: Each = iter) -> ShownRun:
    """Run a text through a model and keep every layer's attention, for the long page. Raises as `explain`."""
    tokens = model.tokenizer.tokens(text)
    run, layers = forward_pass(model, tokens, each), []
    for number, part in enumerate(run.layers):
        matrix = AttentionMatrix(part.q, part.k, **part.rules).part(0)
        layers.append(ShownLayer(str(number), range(len(part.q)), matrix, v=part.v[None]))
    following = [] if run.logits is None else next_tokens(model, run.logits[len(tokens) - 1], 5)
    facts = {"model": model_line(model), "next": [choice[1:3] for choice in following] or None}
    words = {each: {"page": {"next": capitalised(say(each, "next"))}} for each in LANGUAGES}
    return ShownRun(model.name, layers, [token.text for token in tokens], header={"facts": facts, "words": words})
