"""A model's forward pass, checked, and one head of one of its layers."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.core.axes import Array
from clearhead.core.rules import FIELDS, Rules, take
from clearhead.errors import DtypeError, FileError, RuleError, shown
from clearhead.explaining.gpt2 import ForwardPass, LayerRun, Model, Token
from clearhead.explaining.stream import NoWay, Stream, of_gpt2
from clearhead.explaining.texts import check_unicode
from clearhead.ops.matrix import AttentionMatrix
from clearhead.ops.span_terms import SpanTerm
from clearhead.textbook.shapes import Sizes, Steps, layer_steps
from clearhead.textbook.trace import used_rules

if TYPE_CHECKING:
    from clearhead.explaining.hub import HubModel


def check_given(text: str, each: Callable[[range], Iterable[int]]) -> None:
    """Raise for a text that is no string or not Unicode, and for an `each` that cannot be called."""
    if not isinstance(text, str):
        raise DtypeError(f"text is {shown(text)}: expected a string.", 'explain("humpty dumpty sat on")')
    if not callable(each):
        raise RuleError(f"each is {shown(each)}: expected what walks the layers.", "each=tqdm")
    check_unicode("text", text)


def forward_pass(
    model: "Model | HubModel",
    tokens: list[Token],
    each: Callable[[range], Iterable[int]],
    edits: Sequence[Edit] = (),
) -> ForwardPass:
    """The forward pass, with edits. Raises FileError where it gives NaN or infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        run = model.run([t.id for t in tokens], each, edits)
    return _checked(model, run)


def followed(
    model: "Model | HubModel",
    tokens: list[Token],
    each: Callable[[range], Iterable[int]],
    position: int,
    edits: Sequence[Edit] = (),
) -> tuple[ForwardPass, Stream | NoWay | None]:
    """The forward pass, and the residual stream at one position; None where the model says no next token."""
    ids = [t.id for t in tokens]
    if isinstance(model, Model):
        run = forward_pass(model, tokens, each, edits)
        return run, of_gpt2(model, ids, run, position)
    from clearhead.explaining.recorded import of_transformers, recorded

    with recorded(model.inner, model.config.layers, position) as kept:
        run = forward_pass(model, tokens, each, edits)
    return run, None if run.logits is None else of_transformers(kept, run)


def _checked(model: "Model | HubModel", run: ForwardPass) -> ForwardPass:
    """The run. Raises FileError where it has NaN or infinity."""
    for number, layer in enumerate(run.layers):
        if not all(np.isfinite(array).all() for array in (layer.x, layer.q, layer.k, layer.v, layer.output)):
            raise FileError(
                f"{model.name}: layer {number} gives NaN or infinity: its weights are damaged, or too large."
            )
    if run.logits is not None and not np.isfinite(run.logits).all():
        raise FileError(f"{model.name}: its logits are NaN or infinite: its weights are damaged, or too large.")
    return run


def entropy_of(run: ForwardPass, token: int) -> Array:
    """The entropy of one token's row, (layers, heads)."""
    return np.stack([_row_entropy(layer, token) for layer in run.layers])


def _row_entropy(run: LayerRun, token: int) -> Array:
    seen = AttentionMatrix(run.q, run.k, **run.rules).observe(entropy=True, queries=slice(token, token + 1))
    return np.asarray(seen.entropy, dtype=np.float64)[:, 0]


def rules_of_head(rules: dict[str, Any], head: int) -> dict[str, Any]:
    """The rules of one head of the first text, without an axis for either: for 2-D arrays."""
    plain = {name: x for name, x in rules.items() if name != "spans"}
    arrays = {name: np.asarray(x) for name, x in plain.items() if np.ndim(x) and FIELDS[name]}
    own_rules = take(arrays, {"batch": [0], "heads": [head]})
    lead = {name: sum(axis in ("batch", "heads") for axis in FIELDS[name]) for name in own_rules}
    plain |= {name: x.reshape(x.shape[lead[name] :]) for name, x in own_rules.items()}
    if rules.get("spans") is None:
        return plain
    term = SpanTerm.of(rules["spans"])
    table = np.asarray(term.table)[0]
    return plain | {"spans": (term.query_labels[0], term.key_labels[0], table[head if len(table) > 1 else 0])}


def steps_of(run: LayerRun) -> Steps:
    """The steps of a whole layer, all heads, without numbers."""
    (n, width), (heads, _, d_k), (kv_heads, m, d_v) = run.x.shape, run.q.shape, run.v.shape
    sizes = Sizes((), heads, kv_heads, n, m, d_k, d_v)
    used = used_rules(cast("Rules", run.rules))._replace(through=run.through)
    out = (heads * d_v, run.output.shape[-1])
    own, said = (n, width), run.normalised
    return layer_steps(sizes, own, own, out, used, run.biases, "rows", run.x.itemsize, cross=False, normalised=said)
