"""The attention function that Transformers calls: it means the same as eager attention, and can be observed."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AttentionInterface, AttentionMaskInterface
from transformers import masking_utils as theirs

from clearhead.errors import ClearheadError, RuleError
from clearhead.hf.call import check_mask, output, read
from clearhead.hf.masks import RuledMask, keep_rules
from clearhead.ops.attention import attention

NAME = "clearhead"
_WORDS = """
cache_position cu_seq_lens_k cu_seq_lens_q deterministic logits_to_keep max_length_k max_length_q num_items_in_batch
output_hidden_states output_router_logits position_embeddings position_ids return_dict seq_idx sliding_window use_cache
"""
HARMLESS = frozenset(_WORDS.split())  # arguments that models pass to every attention, and that change no score
_NUMBER = (float, type(None))

# For each module, the open block of ch.watch or ch.change that follows it (a `hf.passes.Passes`).
watchers: dict[nn.Module, Any] = {}
changers: dict[nn.Module, Any] = {}
eager: set[nn.Module] = set()  # watched or changed modules whose attention was eager before


def register() -> None:
    """Register our attention and masks with Transformers; without the masks it would make none."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(**options: Any) -> Tensor | None:
    """Make a mask for `AttentionMaskInterface`: one that carries rules, or for compiled models a plain one.

    Masks of static caches are plain too: `generate` makes them outside the forward pass, which may be compiled.
    """
    if not torch.compiler.is_compiling():
        mask = keep_rules(**options)
        static = isinstance(options["q_offset"], Tensor) or mask.has_room
        if watchers or changers or not static:
            return mask
    return (
        theirs.sdpa_mask(**options) if takes_bool_masks(options["config"].model_type) else theirs.eager_mask(**options)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def takes_bool_masks(model_type: str) -> bool:
    """Does every class of this model type take sdpa's masks (bool, or None)? Some add their mask to the scores."""
    try:
        kinds: Any = MODEL_MAPPING[CONFIG_MAPPING[model_type]]
    except KeyError:
        return False
    return all(kind._supports_sdpa for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,  # noqa: FBT001  Transformers' signature
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend, called by Transformers: query (batch, heads, queries, d_k).

    Returns the output (batch, queries, heads, d_v), and None in place of the weights. A compiler traces it as operators
    on tensors; only a mask made outside the compiled part, which carries rules, breaks the graph.
    """
    unchanged = not (torch.compiler.is_compiling() or watchers or changers or dropout) and position_bias is None
    if unchanged and type(attention_mask) is RuledMask and type(scaling) in _NUMBER and type(softcap) in _NUMBER:
        known = _known(attention_mask, query, key, scaling, softcap, more)
        if known is not None:
            with suppress(ClearheadError):  # `_attend` raises it again, and says where
                return attention(query, key, value, sinks=s_aux, **known).transpose(1, 2).contiguous(), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    named_scores = (("scale", scaling), ("softcap", softcap), ("sinks", s_aux))
    scores = {name: x for name, x in named_scores if x is not None}
    if torch.compiler.is_compiling() and not isinstance(attention_mask, RuledMask):
        _check(more)
        check_mask(attention_mask, (*query.shape[:3], key.shape[2]))
        result = _attend_compiled(query, key, value, attention_mask, position_bias, dropout, scores, causal=causal)
    else:
        result = _attend(
            module, (query, key, value), attention_mask, position_bias, dropout, scores, more, causal=causal
        )
    return result.transpose(1, 2).contiguous(), None


def _attend_compiled(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, position_bias: Tensor | None, dropout: float,
    scores: dict[str, Any], *, causal: bool,
) -> Tensor:  # fmt: skip
    """Compute the output (batch, heads, queries, d_v) as one graph, with the masks that Transformers makes itself.

    Without a mask, `causal` aligns query 0 with key 0, and keys after the queries are a static cache's unused room. A
    float mask is added to the scores, and its lowest number forbids.
    """
    queries, rules = query.shape[2], dict(scores)
    if causal and mask is None and queries > 1:
        rules["causal"] = True
        if key.shape[2] > queries:
            key, value = key[:, :, :queries], value[:, :, :queries]
            position_bias = None if position_bias is None else position_bias[..., :queries]
    if mask is not None and mask.dtype != torch.bool:
        allowed = mask > torch.finfo(mask.dtype).min
        added = torch.where(allowed, mask, 0.0)
        position_bias = added if position_bias is None else position_bias + added
        mask = allowed
    rules |= {name: x for name, x in (("mask", mask), ("bias", position_bias)) if x is not None}
    return output(query, key, value, dropout, rules)


@torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
    reason="clearhead: the mask was made outside the compiled part and carries rules"
)
def _attend(
    module: nn.Module, arrays: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, bias: Tensor | None, dropout: float,
    scores: dict[str, Any], more: dict[str, Any], *, causal: bool,
) -> Tensor:  # fmt: skip
    """Compute the output (batch, heads, queries, d_v) outside compilers, edited and observed if a block asks for it."""
    changing, watching = changers.get(module), watchers.get(module)
    layers = [block.layer_of(module) for block in (changing, watching) if block is not None]
    where = f"layer {layers[0].name}" if layers else type(module).__name__
    try:
        _check(more)
        causal = causal and module not in eager  # in eager attention, no mask means that queries see all keys
        call = read(*arrays, mask, bias, causal=causal, scores=scores)
        if changing is not None:
            call = changing.edited(layers[0], call)
        result = call.attended(dropout) if watching is None else watching.attended(layers[-1], call, dropout)
        output: Tensor = call.finish(result)
        return output
    except ClearheadError as error:
        raise type(error)(f"{where}: {error.what.removeprefix(where + ': ')}", error.hint) from error


def _known(
    mask: RuledMask, query: Tensor, key: Tensor, scale: float | None, softcap: float | None, more: Iterable[str]
) -> dict[str, Any] | None:
    """The rules that `_attend` would find for a layer that is not watched or changed: read once for all layers.

    They are kept on the mask, which is new in each forward pass. None if a call needs a closer look: shapes differ, a
    cache has room, arguments may mean something, or code may have written into the mask.
    """
    asked, known = (query.shape, key.shape, scale, softcap, *more), mask.known
    if known is None or known[0] != asked:
        (batch, _, n, m), (row, col) = mask.sizes, mask.start
        known, sizes = (asked, None), (query.shape[0], query.shape[2], key.shape[2])
        if (batch, n, m) == sizes and not mask.has_room and HARMLESS.issuperset(more):
            rules = mask.pattern.rules(range(row, row + n), range(col, col + m))
            known = asked, {"scale": scale, "softcap": softcap, **rules}
        mask.known = known
    return known[1] if mask.untouched else None


def _check(more: dict[str, Any]) -> None:
    """Refuse arguments that may change the scores: none is dropped silently."""
    if more.pop("output_attentions", None):
        raise RuleError(
            "output_attentions=True asks for all weights, and clearhead never stores them.",
            "leave it out, inside `with ch.watch(model) as seen:`; then seen.matrix(layer)[...] gives any weight.",
        )
    unknown = [name for name, value in more.items() if value is not None and name not in HARMLESS]
    if "indices" in unknown:
        raise RuleError(
            "the model itself chooses which keys each query attends to (sparse attention with `indices`), and no rule "
            "here can express that.",
            "ch.AttentionMatrix(q, k, mask=…) observes q and k that you take from the model yourself.",
        )
    if unknown:
        raise RuleError(f"the model passes `{unknown[0]}` to its attention, and clearhead does not know this argument.")
