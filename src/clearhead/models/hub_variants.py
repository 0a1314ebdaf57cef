"""Variants of a run of a Transformers model, and derivatives of its logits by what its heads give, by autograd.

Each variant is a run of its own, whose attention is ours: `ch.change` reads each call, and what it gives is replaced.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from clearhead.changing.change import change
from clearhead.changing.edits import scaled
from clearhead.core.axes import Array
from clearhead.hf import attending
from clearhead.models.gates import LayerBack, attended, through
from clearhead.models.protocol import Each, Slope, Variant


def differentiated(
    inner: Any, ids: Sequence[int], variants: Sequence[Variant], rows: range, slope: Slope
) -> Iterator[tuple[int, int, LayerBack]]:
    """See `Model.differentiated`; without the derivatives by the residual stream."""
    for place, variant in enumerate(variants):
        kept: list[tuple[Any, Any]] = []
        with torch.enable_grad(), _varied(inner, variant, kept):
            logits = inner(torch.tensor([list(ids)]), use_cache=False).logits[0, rows.start : rows.stop]
        by = torch.as_tensor(slope(logits.detach().float().numpy()), dtype=logits.dtype)
        grads = torch.autograd.grad(logits, [output for _, output in kept], by)
        for number in reversed(range(len(kept))):
            call, g = kept[number][0], grads[number][0].numpy()
            q, k, v = (x[0].detach().numpy() for x in (call.q, call.k, call.v))
            part = attended(q, k, v, _plain(call.rules()), variant.gates)
            yield number, place, LayerBack(part, g, through(part, g)[1], np.zeros((0, 0), g.dtype))


def again(inner: Any, ids: Sequence[int], variants: Sequence[Variant], rows: range, each: Each) -> Iterator[Array]:
    """See `HubModel.again`; each variant takes a whole run."""
    for place in each(range(len(variants))):
        with torch.inference_mode(), _varied(inner, variants[place], None):
            read = [variants[place].ids.get(position, token) for position, token in enumerate(ids)]
            yield inner(torch.tensor([read]), use_cache=False).logits[0, rows.start : rows.stop].float().numpy()


@contextmanager
def _varied(inner: Any, variant: Variant, kept: list[tuple[Any, Any]] | None) -> Iterator[None]:
    """Inside, the model runs as the variant says; calls and what their heads give are added to `kept`, by layer."""
    count = 0

    def of_layer(before: Any, module: Any) -> Any:
        stated = before(module)

        def edit(call: Any) -> tuple[Any, Any]:
            nonlocal count
            call, finish = stated.edit(call)
            number, count = count, count + 1

            def finished(output: Any) -> Any:
                if variant.gates is not None or kept is not None:
                    output = attended(call.q, call.k, call.v, call.rules(), variant.gates).output
                if kept is not None:
                    output = output if output.requires_grad else output.requires_grad_()
                    kept.append((call, output))
                output = output if finish is None else finish(output)
                chosen = [(head, x) for (layer, head), x in variant.added.items() if layer == number]
                for head, added in chosen:
                    output = output.clone()
                    output[0, head, variant.first : variant.first + len(added)] += torch.as_tensor(added)
                return output

            return call, finished

        return replace(stated, edit=edit)

    with change(inner, variant.edits or [scaled(1.0)]):  # an edit that does nothing: all calls are read the same way
        for module, before in list(attending.changers.items()):
            attending.changers[module] = partial(of_layer, before)
        yield


def _plain(rules: dict[str, Any]) -> dict[str, Any]:
    """Rules with arrays in place of tensors."""

    def plain(value: Any) -> Any:
        return value.detach().numpy() if isinstance(value, torch.Tensor) else value

    made = {name: plain(value) for name, value in rules.items() if value is not None}
    if "spans" in made:
        made["spans"] = tuple(map(plain, made["spans"]))
    return made
