"""The groups of the benchmark that are not made of cases: each measures something else and has a table of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import causes, change, derivatives, model, spans, steps, truth, watching


class Group(NamedTuple):
    """One group.

    key      its name in bench.json
    costs    measure; with threads and quick=
    lines    the rows of its table, headings first, from what was measured
    needs    the package that must be installed
    """

    key: str
    title: str
    costs: Callable[..., list[Any]]
    lines: Callable[[list[Any]], list[tuple[str, ...]]]
    needs: str


GPT2 = "a model of 12 layers, 12 heads, width 768"
GROUPS = {
    "model": Group("model", "attention inside a model of 6 blocks", model.shares, model.lines, "torch"),
    "spans": Group("spans", "the rule spans on one call", spans.costs, spans.lines, "numpy"),
    "causes": Group("causes", "looking at causes: everything of cuts", causes.costs, causes.lines, "numpy"),
    "derivatives": Group(
        "derivatives", "forward mode and second derivatives", derivatives.costs, derivatives.lines, "torch"
    ),
    "watch": Group("watching", f"watching {GPT2}", watching.costs, watching.lines, "transformers"),
    "steps": Group("steps", f"training steps of {GPT2}, causes watched", steps.costs, steps.lines, "transformers"),
    "change": Group("change", f"changing {GPT2}", change.costs, change.lines, "transformers"),
    "truth": Group("truth", "causes beside the truth, the model that ships", truth.agreements, truth.lines, "numpy"),
}
