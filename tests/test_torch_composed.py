"""torch.func's transforms composed, over PyTorch's own sample inputs of attention, against its math path."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from clearhead.torch import scaled_dot_product_attention
from composed import COMPOSED, by_math

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # PyTorch imports what it deprecates
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # PyTorch's function in its own transforms
]
WIDTH = 2  # of every sample, and its longest batch: a hessian has the square of all inputs' numbers


def samples() -> list[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """Each kind of sample without dropout, which draws other weights; a mask is one more tensor, behind the value."""
    (op,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    result = {}
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=False):
        options = dict(sample.kwargs)
        if options.pop("dropout_p"):
            continue
        mask = options.pop("attn_mask", None)
        tensors = [smaller(x) for x in (sample.input, *sample.args)] + ([] if mask is None else [mask.detach()])
        result[tuple(x.shape for x in tensors), options["is_causal"]] = tuple(tensors), options
    return list(result.values())


def smaller(x: Tensor) -> Tensor:
    return x.detach()[(*(slice(2) for _ in x.shape[:-2]), slice(None), slice(WIDTH))].contiguous()


SAMPLES = samples()
QUICK = {(0, name) for name in COMPOSED} | {(len(SAMPLES) - 1, "vmap of jvp of vjp"), (len(SAMPLES) - 1, "hessian")}


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(number, name, marks=[] if (number, name) in QUICK else pytest.mark.gate)
        for number in range(len(SAMPLES))
        for name in COMPOSED
    ],
)
def test_composed_transforms_equal_those_of_pytorchs_math_path(number: int, name: str):
    tensors, options = SAMPLES[number]
    ours = COMPOSED[name](lambda *x: scaled_dot_product_attention(*x, **options), tensors)
    truth = COMPOSED[name](lambda *x: by_math(*x, **options), tensors)
    torch.testing.assert_close(ours, truth, rtol=1e-8, atol=1e-9)
