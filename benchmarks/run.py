"""Run the cases and write the table: as text, JSON, CSV and a plot."""

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

from benchmarks import peers
from benchmarks.cases import Case
from benchmarks.groups import GROUPS
from benchmarks.limits import Limits
from clearhead.bench.measure import Timing, interleaved, ratio
from clearhead.errors import MissingExtraError


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """The figures of one case: each contestant's seconds, and how many times as fast as each peer ours is."""

    case: Case
    seconds: dict[str, float]
    ratios: dict[str, float]
    share: float  # share of the peak multiply-adds, or of the read bandwidth in decoding
    missing: dict[str, str]  # peers that could not take the case, and why

    def flat(self) -> dict[str, Any]:
        """One row of the CSV."""
        figures: dict[str, Any] = {"group": self.case.group, "case": self.case.name, "share of limit": self.share}
        figures |= {f"{name} seconds": value for name, value in self.seconds.items()}
        return figures | {f"{name} ratio": value for name, value in self.ratios.items()}


@dataclass(frozen=True, eq=False, slots=True)
class Report:
    """All figures of one benchmark run."""

    rows: list[Row]
    costs: dict[str, list[Any]]  # by group of benchmarks/groups.py
    machine: dict[str, str | int]
    limits: Limits


def measure(
    case: Case, chosen: Iterable[str], limits: Limits, threads: int, *, rounds: int, slice_seconds: float
) -> Row:
    """Set up every contestant on the same inputs and time them by turns."""
    given = peers.inputs(case)
    calls = {"clearhead": peers.ours(case, given, threads)}
    missing: dict[str, str] = {}
    names = list(chosen)
    if case.kind == "observe":
        names += ["used matrix", *(["materialised"] if "torch" in names else [])]
    for name in names:
        try:
            made = peers.setup(name)(case, given, threads)
            differs = not isinstance(made, str) and peers.differs(case, calls["clearhead"], made)
        except Exception as error:  # a peer's error is recorded, and the run goes on
            made, differs = f"{type(error).__name__}: {str(error).splitlines()[0]}", False
        if isinstance(made, str):
            missing[name] = made
        elif differs:
            missing[name] = "its result differs"
        else:
            calls[name] = made
    timings: dict[str, Timing] = interleaved(calls, rounds=rounds, slice_seconds=slice_seconds)
    own = timings["clearhead"]
    limit = limits.bytes_read if case.kind == "decode" else limits.multiply_adds
    work = case.bytes_read if case.kind == "decode" else case.multiply_adds
    return Row(
        case,
        {name: timing.median for name, timing in timings.items()},
        {name: ratio(timing, own) for name, timing in timings.items() if name != "clearhead"},
        work / own.median / limit,
        missing,
    )


def summary(rows: list[Row]) -> list[dict[str, Any]]:
    """The geometric mean and the worst ratio for each group and peer."""
    found = []
    for group in dict.fromkeys(row.case.group for row in rows):
        members = [row for row in rows if row.case.group == group]
        for peer in dict.fromkeys(name for row in members for name in row.ratios):
            ratios = [row.ratios[peer] for row in members if peer in row.ratios]
            found.append({"group": group, "peer": peer, "mean": geometric_mean(ratios), "worst": min(ratios)})
    return found


def as_json(report: Report) -> str:
    """Everything measured, as JSON."""
    data: dict[str, Any] = {
        "machine": report.machine,
        "limits": report.limits._asdict(),
        "rows": [asdict(row) for row in report.rows],
        "summary": summary(report.rows),
    }
    for name, group in GROUPS.items():
        data[group.key] = [cost._asdict() for cost in report.costs.get(name, [])]
    return json.dumps(data, indent=1) + "\n"


def as_csv(rows: list[Row]) -> str:
    """One CSV line per case."""
    columns = list(dict.fromkeys(name for row in rows for name in row.flat()))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.flat() for row in rows)
    return text.getvalue()


def as_markdown(report: Report) -> str:
    """The tables of docs/performance.md."""
    told = " · ".join(f"{name} {value}" for name, value in report.machine.items())
    lines = [
        told,
        "",
        f"Limits measured in the same run: {report.limits.multiply_adds / 1e9:.0f} G multiply-adds/s in float32, "
        f"{report.limits.bytes_read / 1e9:.0f} GB/s read.",
    ]
    if report.rows:
        lines += ["", *_tables(report.rows)]
    for name, costs in report.costs.items():
        head, *rest = GROUPS[name].lines(costs)
        words = [any(cell[0].isalpha() for cell in column) for column in zip(*rest, strict=True)]
        lines += ["", _line(head), _line("---" if left else "---:" for left in words), *map(_line, rest)]
    return "\n".join(lines) + "\n"


def _tables(rows: list[Row]) -> list[str]:
    lines = [
        "| group | case | clearhead, ms | share of limit | times as fast as |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for row in rows:
        ratios = ", ".join(f"{name} {value:.2f}" for name, value in row.ratios.items())
        own = row.seconds["clearhead"] * 1e3
        lines.append(f"| {row.case.group} | {row.case.name} | {own:.3f} | {row.share:.0%} | {ratios} |")
    lines += ["", "| group | peer | geometric mean | worst |", "| --- | --- | ---: | ---: |"]
    return lines + [f"| {s['group']} | {s['peer']} | {s['mean']:.2f} | {s['worst']:.2f} |" for s in summary(rows)]


def _line(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |"


def plot(rows: list[Row]) -> bytes:
    """An SVG of the ratios to each peer, as dots over the cases with a line at 1."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("the plot needs matplotlib.", 'pip install "clearhead[bench]"') from None
    figure = Figure(figsize=(9, 1.5 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = [f"{row.case.group}: {row.case.name}" for row in rows]
    for peer in dict.fromkeys(name for row in rows for name in row.ratios):
        points = [(row.ratios[peer], place) for place, row in enumerate(rows) if peer in row.ratios]
        axes.plot(*zip(*points, strict=True), "o", label=peer)
    axes.axvline(1, color="grey", linewidth=1)
    axes.set(xscale="log", xlabel="times as fast as the peer (log scale)", yticks=range(len(names)), yticklabels=names)
    axes.invert_yaxis()
    axes.legend()
    axes.grid(axis="x", alpha=0.3)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()
