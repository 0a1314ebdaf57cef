"""Run the cases; all figures as JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.groups import GROUPS
from benchmarks.limits import Limit, limit_of
from clearhead.bench.self_check import interleaved, ratio

_LIMIT = "limit"  # among the contestants


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """The figures of one case: each contestant's seconds, and how many times as fast as each peer ours is."""

    case: Case
    seconds: dict[str, float]
    ratios: dict[str, float]
    limit: str  # the name of the case's limit
    shares: dict[str, float]  # of the limit's rate, by turns with it: of each contestant, ours too
    missing: dict[str, str]  # peers that could not take the case, and why


@dataclass(frozen=True, eq=False, slots=True)
class Report:
    """All figures of one benchmark run."""

    rows: list[Row]
    costs: dict[str, list[Any]]  # by group of benchmarks/groups.py
    machine: dict[str, str | int]
    limits: Mapping[str, Limit]
    origin: dict[str, str]  # date, commit and command


def measure(
    case: Case, chosen: Iterable[str], limits: Mapping[str, Limit], threads: int, *, rounds: int, slice_seconds: float
) -> Row:
    """Set up every contestant on the same inputs and time them, and what limits them, by turns."""
    inputs = peers.inputs(case)
    calls = {"clearhead": peers.ours(case, inputs, threads)}
    missing: dict[str, str] = {}
    names = list(chosen)
    if case.kind == "observe" and "torch" in names:
        names.append("materialised")
    for name in names:
        try:
            made = peers.setup(name)(case, inputs, threads)
            differs = not isinstance(made, str) and peers.differs(case, calls["clearhead"], made)
        except Exception as error:  # a peer's error is recorded, and the run goes on
            made, differs = f"{type(error).__name__}: {str(error).splitlines()[0]}", False
        if isinstance(made, str):
            missing[name] = made
        elif differs:
            missing[name] = "its result differs"
        else:
            calls[name] = made
    bound = limit_of(case, limits)
    limit = limits[bound]
    timings = interleaved({**calls, _LIMIT: limit.call}, rounds=rounds, slice_seconds=slice_seconds)
    most, local = timings.pop(_LIMIT), timings["clearhead"]
    work = case.bytes_read if case.kind == "decode" else case.multiply_adds
    return Row(
        case,
        {name: median(timing) for name, timing in timings.items()},
        {name: ratio(timing, local) for name, timing in timings.items() if name != "clearhead"},
        bound,
        {name: work / limit.work * ratio(most, timing) for name, timing in timings.items()},
        missing,
    )


def as_json(report: Report) -> str:
    """Everything measured, as JSON."""
    data: dict[str, Any] = {
        **report.origin,
        "machine": report.machine,
        "limits": {name: {"by": limit.by, "rate": limit.rate} for name, limit in report.limits.items()},
        "rows": [asdict(row) for row in report.rows],
    }
    for name, group in GROUPS.items():
        data[group.key] = [cost._asdict() for cost in report.costs.get(name, [])]
    return json.dumps(data, indent=1) + "\n"
