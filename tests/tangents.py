"""Derivatives along a direction by PyTorch's forward mode through the plain formulas."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.core import observations, visibility
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array
from clearhead.core.statistics import Groups
from losses import formula
from problems import Case

INPUTS = ("q", "k", "v", "bias", "sinks", "spans")
HEIGHT, WIDTH = 3, 2


@dataclass(frozen=True)
class Along:
    """A case, a direction for each of its inputs, and some of its results."""

    case: Case
    moving: tuple[str, ...]  # inputs with a tangent
    answers: tuple[str, ...]

    @cached_property
    def groups(self) -> Groups:
        problem = self.case.problem
        queries, keys = self.case.labels()
        wide = np.broadcast_to(keys, (problem.batch, problem.keys))
        return Groups(queries.reshape(problem.batch, problem.queries), wide, (3, 4))

    @cached_property
    def inputs(self) -> dict[str, Array]:
        """What has a derivative, (batch, heads, …), or as the caller gave it."""
        passed = self.case.given
        return self.case.leaves | {"q": passed.q, "k": passed.k, "v": passed.v}

    @cached_property
    def tangents(self) -> dict[str, Array]:
        rng = np.random.default_rng(self.case.seed + 2)
        drawn = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in self.inputs.items()}
        return {name: x for name, x in drawn.items() if name in self.moving}

    def results(self, leaves: dict[str, Tensor], draw: int = 0) -> tuple[Tensor, ...]:
        """The results by the plain formulas; a draw other than 0 rounds each logit as float32 does."""
        problem = self.case.problem
        visible = torch.from_numpy(visibility.dense(problem))
        noise = np.random.default_rng((self.case.seed, draw)).uniform(-(2.0**-23), 2.0**-23, visible.shape)
        result = formula(self.case, visible, **leaves, noise=torch.from_numpy(noise) if draw else 0.0)
        weights = result["weights"]
        far = torch.from_numpy(np.broadcast_to(abs(self.case.book.block.ahead), weights.shape).copy()).to(weights.dtype)
        result["distance"] = (weights * far).sum(-1)
        result["diagonal"] = torch.where(far == 0, weights, 0.0).sum(-1)
        sides = [
            torch.zeros(size, problem_size, dtype=weights.dtype)
            for size, problem_size in ((HEIGHT, problem.queries), (WIDTH, problem.keys))
        ]
        for side, size, length in zip(sides, (HEIGHT, WIDTH), (problem.queries, problem.keys), strict=True):
            if length:
                pixels, shares = observations.areas(size, length, slice(0, length))
                side[pixels] = torch.from_numpy(shares).to(weights.dtype)
        result["image"] = sides[0] @ weights @ sides[1].T
        member = [
            torch.from_numpy((x[:, None, :, None] == np.arange(count)).astype(np.float64)).to(weights.dtype)
            for x, count in zip(self.groups[:2], self.groups.counts, strict=True)
        ]
        result["groups"] = member[0].transpose(-1, -2) @ weights @ member[1]
        return tuple(result[name] for name in self.answers)

    def leaves(self, dtype: torch.dtype, spread: float, draw: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The inputs and their tangents, each number changed by a random share of itself, at most `spread`."""
        rng = np.random.default_rng((self.case.seed, draw))

        def tensor(x: Array) -> Tensor:
            wide = x.astype(np.float64)
            return torch.from_numpy(np.asarray(wide * (1 + rng.uniform(-spread, spread, x.shape)))).to(dtype)

        inputs = {name: tensor(x) for name, x in self.inputs.items()}
        zero = {name: torch.zeros_like(x) for name, x in inputs.items()}
        return inputs, zero | {name: tensor(x) for name, x in self.tangents.items()}

    def forward(
        self, dtype: torch.dtype = torch.float64, spread: float = 0.0, draw: int = 0
    ) -> dict[str, tuple[Array, Array]]:
        """Each result and its tangent."""
        inputs, moving = self.leaves(dtype, spread, draw)
        values, moved = torch.func.jvp(partial(self.results, draw=draw), (inputs,), (moving,))
        return {name: (x.numpy(), y.numpy()) for name, x, y in zip(self.answers, values, moved, strict=True)}

    @cached_property
    def first(self) -> dict[str, tuple[Array, Array]]:
        return self.forward()

    @cached_property
    def upstream(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Upstream gradients of the results, and their tangents."""
        rng = np.random.default_rng(self.case.seed + 3)
        usual = statistics_dtype(self.case.problem.dtype)
        return tuple(  # type: ignore[return-value]
            {
                name: rng.standard_normal(x.shape).astype(self.case.problem.dtype if name == "output" else usual)
                for name, (x, _) in self.first.items()
            }
            for _ in range(2)
        )

    def backward(self, dtype: torch.dtype = torch.float64, spread: float = 0.0, draw: int = 0) -> dict[str, Array]:
        """The tangents of the gradients of all inputs."""
        inputs, moving = self.leaves(dtype, spread, draw)
        by, changing = ([torch.from_numpy(x.astype(np.float64)).to(dtype) for x in s.values()] for s in self.upstream)

        def gradients(leaves: dict[str, Tensor], grads: list[Tensor]) -> Any:
            return torch.func.vjp(partial(self.results, draw=draw), leaves)[1](tuple(grads))[0]

        result = torch.func.jvp(gradients, (inputs, by), (moving, changing))[1]
        return {name: x.numpy() for name, x in result.items()}

    @cached_property
    def second(self) -> dict[str, Array]:
        return self.backward()
