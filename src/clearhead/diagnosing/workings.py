"""Computes a recipe's numbers: the definition's steps, with the recipe's changes before, between and after them.

`Workings(inputs)` computes in float64. With a dtype it is a plain run that rounds every step to that dtype.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from clearhead.core.axes import Array, join_heads
from clearhead.core.block import Block
from clearhead.core.definition import STEPS, logits, mix, over_heads, product, softmax, split
from clearhead.diagnosing.changes import OPERANDS, SCORING, SEEING, Workings, changed_rules, selected, visible
from clearhead.diagnosing.recipe import STAGES, Recipe, Rows, eps

_ORDERS = {  # the order of the steps before the mask, for a softcap in the wrong place
    "before scale": ("capped", "scaled", "biased"),
    "after bias": ("scaled", "biased", "capped"),
    "after mask": ("scaled", "biased"),
}
_AXES = {"queries": (-2,), "matrix": (-2, -1), "heads": (1,), "batch": (0,), "all": (0, 1, 2, 3)}
SOFTMAX = frozenset({"axis", "softmax", "rescale"})  # each replaces the whole softmax
_OFF = 0.0025  # the largest error that the rounding of a log-sum-exp may excuse
_SCORED = OPERANDS | SCORING
_MASKED = _SCORED | SEEING | {"masking", "fill"}


def answer(work: Workings, recipe: Recipe, rows: Rows) -> Array:
    """The recipe's numbers at the stage of theirs, for these rows; all rows for q, k and v."""
    result: Array = work.once(("answer", rows, frozenset(recipe.items())), lambda: _answer(work, recipe, rows))
    return result


def _answer(work: Workings, recipe: Recipe, rows: Rows) -> Array:
    stage = work.inputs.stage
    if stage in "qkv":
        return work.operands(recipe)["qkv".index(stage)]
    if stage == "weights":
        return _of_heads(work, recipe, rows, weights)
    if STAGES.index(stage) < STAGES.index("weights"):  # later changes have no effect yet
        late = recipe["softcap"] == "after mask" and stage != "masked"
        return scores(work, recipe.but(softcap=None) if late else recipe, rows, stage)
    return _layer_output(work, recipe, rows) if work.inputs.merged else _output(work, recipe, rows)


# ── from queries and keys to the logits ──


def scores(work: Workings, recipe: Recipe, rows: Rows, stage: str = "masked") -> Array:
    """The definition's steps up to `stage`, (batch, heads, rows, keys)."""
    if stage in work.given:
        return work.given[stage]
    compute, fields = {"scores": (_products, OPERANDS), "masked": (_masked, _MASKED)}.get(stage, (_unmasked, _SCORED))
    result: Array = work.once((stage, rows, recipe.key(fields)), lambda: compute(work, recipe, rows, stage))
    return result


def _products(work: Workings, recipe: Recipe, rows: Rows, _stage: str) -> Array:
    q, k, _v = work.operands(recipe)
    return work.rounded(product(take(q, rows), k.swapaxes(-1, -2)))


def _rules(work: Workings, recipe: Recipe, rows: Rows) -> Block:
    """The rules of the scores; keys with a bias of -inf are masked like any other hidden key."""
    x = selected(changed_rules(work.problem, Recipe(recipe.key(SCORING))), rows, work.dtype)
    if x.bias is None:
        return x
    factor = {"negated": -1.0, "scaled": x.scale}.get(recipe["bias"], 1.0)
    return replace(x, bias=np.where(np.isneginf(x.bias), work.dtype.type(0), x.bias) * factor)


def _unmasked(work: Workings, recipe: Recipe, rows: Rows, stage: str) -> Array:
    block, x = _rules(work, recipe, rows), scores(work, recipe, rows, "scores")
    for step in _ORDERS.get(recipe["softcap"], ("scaled", "capped", "biased")):
        if STAGES.index(step) <= STAGES.index(stage):
            x = work.given[step] if step in work.given else _step(work, recipe, step, block, x)
    return x


def _step(work: Workings, recipe: Recipe, step: str, block: Block, x: Array) -> Array:
    cap = block.softcap if step == "capped" else None
    if cap is not None and recipe["softcap"] == "clipped":
        return np.clip(x, -cap, cap)
    x = work.rounded(STEPS[step](block, x))
    return x / cap if cap is not None and recipe["softcap"] == "not multiplied" else x


def _masked(work: Workings, recipe: Recipe, rows: Rows, _stage: str) -> Array:
    x, how = scores(work, recipe, rows, "biased"), recipe["masking"]
    if how == "after":
        return x
    seen = seen_by(work, recipe, rows)
    if how in ("one seen", "one hidden"):
        return x + (seen if how == "one seen" else ~seen).astype(x.dtype)
    if how in ("fill", "add"):
        seen = seen | np.isneginf(x)  # the table of spans forbids these already
        return np.where(seen, x, work.dtype.type(recipe["fill"]) + (x if how == "add" else 0))
    x = STEPS["masked"](Block(positions=None, places=None, seen=seen), x)
    late = recipe["softcap"] == "after mask"
    return _step(work, recipe, "capped", _rules(work, recipe, rows), x) if late else x


def seen_by(work: Workings, recipe: Recipe, rows: Rows) -> Array:
    """Which keys these rows see, bool (batch, heads or 1, rows, keys)."""
    key = ("visible", rows, recipe.key(SEEING))
    result: Array = work.once(key, lambda: visible(work.problem, recipe, rows))
    return result


# ── from the logits to the weights ──


def weights(work: Workings, recipe: Recipe, rows: Rows) -> Array:
    """A, (batch, heads, rows, keys)."""
    if "weights" in work.given:
        return work.given["weights"]
    if not recipe.wide:
        return _weights(work, recipe, rows)
    result = _weights(work, recipe, tuple(range(work.problem.queries)))
    return take(result.swapaxes(-1, -2) if recipe["turned"] else result, rows)


def _weights(work: Workings, recipe: Recipe, rows: Rows) -> Array:
    x, sinks, again = scores(work, recipe, rows), None, recipe["again"]
    if work.problem.sinks is not None:
        sinks = selected(changed_rules(work.problem, recipe), rows, work.dtype).sinks
    result = _softmaxed(recipe, x, sinks)
    if work.rounded_sums:
        off = eps(np.dtype(np.float32)) * np.abs(_log_sum(x, sinks))
        result = result * np.exp(-np.minimum(off, _OFF))
    if recipe["averaged"] is not None:
        result = np.broadcast_to(result.mean(axis=1, keepdims=True), result.shape)
    asked = again == "seen keys" or recipe.keys() & {"masking", "empty"}
    seen = seen_by(work, recipe, rows) if asked else np.array(True)
    if again is not None:
        result = softmax(np.where(seen, result, -np.inf))[1]
    if recipe["masking"] == "after":
        result = result * seen
    if recipe["empty"] is not None:
        empty_rows = ~seen.any(axis=-1, keepdims=True)
        result = np.where(empty_rows, np.nan if recipe["empty"] == "nan" else 1 / work.problem.keys, result)
    result = result if recipe["scaling"] is None else result * work.problem.scale[:, None, None]
    return work.rounded(result)


# ── from the weights to the output ──


def _output(work: Workings, recipe: Recipe, rows: Rows) -> Array:
    """A·V per head, (batch, heads, rows, d_v)."""
    if "heads" in work.given:
        return work.given["heads"]
    return _of_heads(work, recipe, rows, _across if recipe["across"] is not None else _mixed)


def _of_heads(work: Workings, recipe: Recipe, rows: Rows, compute: Callable[[Workings, Recipe, Rows], Array]) -> Array:
    """Give each head its own result, head 0's, or the mean of all."""
    result = compute(work, recipe, rows)
    if recipe["heads"] is None:
        return result
    some = result[:, :1] if recipe["heads"] == "first" else result.mean(axis=1, keepdims=True)
    return np.broadcast_to(some, result.shape)


def _mixed(work: Workings, recipe: Recipe, rows: Rows) -> Array:
    """The weights times the values; a nonfinite value with weight 0 is ignored."""
    a = weights(work, recipe, rows)
    return work.rounded(mix(a, split(work.operands(recipe)[2]), lambda: a == 0))


def _across(work: Workings, recipe: Recipe, rows: Rows) -> Array:
    """Attention in which the heads of a token, or the batch entries, attend to each other; causal is the only rule."""
    order = (0, 2, 1, 3) if recipe["across"] == "heads" else (2, 1, 0, 3)
    q, k, v = (take(over_heads(x, work.problem.heads), rows).transpose(order) for x in work.operands(recipe))
    ruled, places = changed_rules(work.problem, recipe), np.arange(k.shape[2])
    scale, right = float(ruled.scale[0]), 0 if ruled.causal else None
    block = Block(q=q, k=k, positions=places[:, None], places=places, right=right, scale=scale)
    return work.rounded(softmax(logits(block))[1] @ v).transpose(order)


def _layer_output(work: Workings, recipe: Recipe, rows: Rows) -> Array:
    """U, or the heads joined, (batch, 1, rows, d_out)."""
    layer, many, n = work.inputs.layer, work.problem.heads, work.problem.queries
    assert layer is not None
    if "concat" in work.given:
        joined = work.given["concat"][:, 0]
    elif recipe["merge"] == "flat":  # (heads·n, d_v) read as (n, heads·d_v)
        flat = np.array(rows)[:, None] * many + np.arange(many)
        needed = sorted(set((flat % n).ravel().tolist()))
        joined = _output(work, recipe, tuple(needed))[:, flat // n, np.searchsorted(needed, flat % n)]
        joined = joined.reshape(*joined.shape[:2], joined.shape[2] * joined.shape[3])
    else:
        joined = _output(work, recipe, rows)
        joined = join_heads(np.swapaxes(joined, 1, 3) if recipe["merge"] == "interleaved" else joined)
    if work.inputs.stage == "output" and recipe["w_o"] != "missing":
        if "o" in layer.w:
            w = layer.w["o"].astype(work.dtype)
            joined = work.rounded(joined @ (w.T if recipe["w_o"] == "transposed" else w))
        if "o" in layer.b and recipe["b_o"] is None:
            joined = work.rounded(joined + layer.b["o"].astype(work.dtype))
    return np.asarray(joined[:, None])


def take(x: Array, rows: Rows) -> Array:
    """These rows of (batch, heads, rows, …); the array itself where these are all."""
    return x if len(rows) == x.shape[2] else x.take(rows, 2)


# ── the softmax or its wrong substitutes, from logits (batch, heads, rows, keys), -inf where hidden ──


def _softmaxed(recipe: Recipe, x: Array, sinks: Array | None) -> Array:
    """Compute the recipe's weights from logits; sinks are (heads, 1, 1)."""
    if recipe["powers"] == "2":
        x, sinks = x * np.log(2.0), None if sinks is None else sinks * np.log(2.0)
    if recipe["axis"] == "none":
        return np.where(np.isneginf(x), 0.0, x)
    if recipe["axis"] is not None:
        powers = np.exp(x - _finite(x.max(axis=_AXES[recipe["axis"]], keepdims=True, initial=-np.inf)))
        return powers / np.maximum(1.0, powers.sum(axis=_AXES[recipe["axis"]], keepdims=True))  # 0 where all are hidden
    if recipe["rescale"] is not None:
        return _not_rescaled(recipe["rescale"], recipe["block"], x, sinks)
    if recipe["softmax"] is None and recipe["sinks"] != "unshifted":
        return np.asarray(softmax(x, sinks)[1])
    m = _finite(x.max(axis=-1, keepdims=True, initial=-np.inf))
    total = _log_sum(x, sinks + m if sinks is not None and recipe["sinks"] == "unshifted" else sinks)
    divided = {  # the logarithm of the denominator
        "no sum": m,
        "no sum, no maximum": 0.0 * m,
        "one more": np.logaddexp(total, 0.0),
        "one more, shifted": np.logaddexp(total, m),
    }
    return np.asarray(np.exp(x - _finite(divided.get(recipe["softmax"], total))))


def _log_sum(x: Array, sinks: Array | None = None) -> Array:
    """Each row's log-sum-exp, (…, rows, 1)."""
    return np.asarray(softmax(x, sinks)[0].logsumexp[..., None])


def _finite(x: Array) -> Array:
    """Replace -inf, the maximum of a row that sees no key, by 0."""
    return np.where(np.isneginf(x), x.dtype.type(0), x)


def _not_rescaled(what: str, size: int, x: Array, sinks: Array | None) -> Array:
    """An online softmax over blocks of keys that fails to rescale earlier sums when the maximum rises."""
    starts = np.arange(0, x.shape[-1], size)
    running = _finite(np.maximum.accumulate(np.maximum.reduceat(x, starts, axis=-1), axis=-1))
    final, right = running[..., -1:], x - running[..., -1:]
    stale = x - running[..., np.arange(x.shape[-1]) // size]  # exponents relative to the maximum at their block
    above, below = (right if what == kept else stale for kept in ("sum", "values"))
    return np.asarray(np.exp(above - _finite(_log_sum(below, None if sinks is None else sinks - final))))
