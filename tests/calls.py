"""Wrong values to put in place of an argument, by name."""

import itertools
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

RNG = np.random.default_rng(5)
FLAT = RNG.standard_normal((3, 4))


def generator() -> Iterator[int]:
    yield 1


# fmt: off
SIMPLE = (
    None, "x", "", b"", -1, 0, 1, 7, 1.5, np.nan, np.inf, -np.inf, 2**70, -(2**70), True, False, 1j, [], [[]], [1, [2]],
    [None], ["x"], [2**70], (), (1, 2), (1, 2, 3), ("n", 3), (-2, 2.5), (True, 3), (2**70,) * 2, {}, {1: 2}, {1, 2},
    ..., slice(None), slice("a", "b"), slice(None, None, 0), range(3), Path("nowhere"), Decimal(1), "\ud800", "a\0b",
)
PLAIN: dict[str, Any] = {
    **{repr(x): x for x in SIMPLE}, "a type": int, "a function": generator,
}
ARRAYS: dict[str, Any] = {
    "whole": np.ones((3, 4), int), "narrow": FLAT.astype(np.float32), "half": FLAT.astype(np.float16),
    "complex": FLAT + 0j, "objects": FLAT.astype(object), "texts": FLAT.astype(str), "truths": FLAT > 0,
    "times": FLAT.astype("datetime64[s]"), "0-d": np.array(3.0),
    "no elements": np.zeros(0), "no rows": np.zeros((0, 4)), "no columns": np.zeros((3, 0)), "a row": np.ones(4),
    "three": np.ones(3), "five axes": np.ones((1, 1, 1, 3, 4)), "three axes": np.ones((2, 3, 4)),
    "four axes": RNG.standard_normal((2, 2, 3, 4)),
    "turned": np.asfortranarray(FLAT), "a matrix": FLAT.view(np.matrix), "big-endian": FLAT.astype(">f8"),
    "long double": FLAT.astype(np.longdouble),
    "backwards": FLAT[::-1, ::-1], "nan array": np.full((3, 4), np.nan), "bfloat16": FLAT.astype(ml_dtypes.bfloat16),
    "many rows": np.broadcast_to(0.0, (2**40, 4)), "many columns": np.broadcast_to(0.0, (3, 2**40)),
    "many": np.broadcast_to(0, 2**40), "most": np.array([2**64 - 1] * 3, np.uint64), "np.int64": np.int64(2),
    "np.float32": np.float32(1), "np.bool": np.bool_(True), "np.str": np.str_("x"),
    "a tensor": torch.ones(3, 4), "a double tensor": torch.ones(3, 4, dtype=torch.float64),
    "0-d tensor": torch.tensor(2),
    "needs gradients": torch.ones(3, 4, dtype=torch.float64, requires_grad=True), "complex tensor": torch.ones(3,
    4) * 1j,
    "whole tensor": torch.ones(3, 4, dtype=torch.int64), "sparse": torch.eye(4)[:3].to_sparse(),
    "nowhere": torch.ones(3, 4, device="meta"), "float8": torch.ones(3, 4).to(torch.float8_e4m3fn),
}
# fmt: on


MADE: dict[str, Callable[[], Any]] = {
    "a generator": generator,
    "masked": lambda: np.ma.masked_array(FLAT, FLAT > 0),
    "object": object,
    "endless": lambda: itertools.repeat(1),
    "lazy": lambda: torch.nn.LazyLinear(3).weight,
    "huge list": lambda: [0.5] * 10**6,
    "enormous": lambda: np.broadcast_to(np.float32(1), (2, 4, 2**40, 8)),
    "enormous tensor": lambda: torch.ones(1, 1, 1, 1).expand(2, 4, 2**40, 8),
}
WRONG: dict[str, Callable[[], Any]] = {**{n: lambda x=x: x for n, x in {**PLAIN, **ARRAYS}.items()}, **MADE}
