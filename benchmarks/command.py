"""The benchmarks on the CPU: choose cases and peers, measure with a progress bar, print the table, save it."""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import peers, run, written
from benchmarks.cases import Case, cases
from benchmarks.groups import GROUPS
from benchmarks.limits import READS, Limit, limits, machine, origin
from clearhead.core.files import write_whole
from clearhead.digits import fixed
from clearhead.errors import FileError, MissingExtraError, unknown

if TYPE_CHECKING:
    from rich.console import Console

_SHARES = ("clearhead", "torch")  # the contestants whose shares are printed; the files have all


def bench(
    *,
    quick: bool,
    chosen: str | None,
    only: str | None,
    save: str | None,
    threads: int,
    faithful: dict[str, Any] | None = None,
) -> None:
    """Measure and report: messages and progress go to standard error, the table to standard output.

    faithful   what is asked of that group, which takes hours and is run only by its name
    """
    from clearhead.report.console import console

    installed = peers.available()
    names = installed if chosen is None else [name for name in chosen.split(",") if name]
    for name in names:
        if name not in installed:
            raise unknown("peer", name, installed)
    every = cases(quick=quick)
    groups = list(dict.fromkeys(case.group for case in every))
    installed_too = [name for name, group in GROUPS.items() if find_spec(group.needs)]
    usual = [] if quick else [name for name in installed_too if name != "faithful"]
    asked = [*groups, *usual] if only is None else only.split(",")
    wanted = [name for one in asked for name in (groups if one == "cases" else [one])]
    for name in wanted:
        if name not in (*groups, *GROUPS):
            raise unknown("group", name, ("cases", *groups, *GROUPS))
        if name in GROUPS and name not in installed_too:
            raise MissingExtraError(f"the group {name} needs {GROUPS[name].needs}.", GROUPS[name].install)
    folder = None if save is None else Path(save)
    if folder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"{folder} cannot be a folder: {error.strerror}.") from None
    result = machine(threads)
    known = limits(threads)
    rows = _measured([case for case in every if case.group in wanted], names, known, threads, quick=quick)
    costs = {
        name: _status(
            group.title, partial(group.costs, **((faithful or {}) if name == "faithful" else {})), threads, quick
        )
        for name, group in GROUPS.items()
        if name in wanted
    }
    report = run.Report(rows, costs, result, known, origin("benchmarks"))
    show(console(), report)
    if folder is not None:
        write_whole(folder / "bench.json", run.as_json(report).encode("utf-8"))


def show(console: "Console", report: run.Report) -> None:
    """Print milliseconds, shares of the limit and ratio to each peer for all cases; then the tables of other groups."""
    from rich.text import Text

    from clearhead.report.console import put

    if report.rows:
        console.print(_table(report.rows))
        console.print("\ntimes as fast: geometric mean / worst")
        for line in written.summary([asdict(row) for row in report.rows]):
            mean, worst = fixed(line["mean"], 2, 6), fixed(line["worst"], 2, 6)
            console.print(f"  {line['group']:<26} {line['peer']:<13} {mean:>6} / {worst}")
    for name, costs in report.costs.items():
        console.print(f"\n{GROUPS[name].title}")
        _columns(console, GROUPS[name].lines(costs))
    console.print("\nlimits:")
    for name, limit in report.limits.items():
        unit = "GB/s" if name == READS else "G multiply-adds/s"
        console.print(f"  {name:<26} {limit.rate / 1e9:6.0f} {unit} ({limit.by})")
    put(console, [Text("; ".join(f"{name} {value}" for name, value in report.machine.items()))])


def _columns(console: "Console", lines: list[tuple[str, ...]]) -> None:
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for words in lines:
        console.print("  ".join(f"{word:>{width}}" for word, width in zip(words, wide, strict=True)))


def _table(rows: list[run.Row]) -> str:
    """Two lines per case, so that seven peers fit into 80 columns: its name and shares of its limit; its figures."""
    names = list(dict.fromkeys(name for row in rows for name in row.ratios))
    heads = [f"{'ms':>10}", *names]
    lines, group = ["  ".join(heads)], ""
    for row in rows:
        if row.case.group != group:
            group = row.case.group
            lines.append(f"[{group}]")
        ratios = [fixed(row.ratios[name], 2, 6) if name in row.ratios else "-" for name in names]
        figures = [fixed(row.seconds["clearhead"] * 1e3, 3, 10), *ratios]
        shares = ", ".join(f"{name} {written.share(x)}" for name, x in row.shares.items() if name in _SHARES)
        lines.append(f"{row.case.name}   of limit: {shares}")
        lines.append("  ".join(f"{figure:>{len(head)}}" for figure, head in zip(figures, heads, strict=True)))
    return "\n".join(lines)


def _status(words: str, work: Callable[..., list[Any]], threads: int, quick: bool) -> list[Any]:
    from rich.console import Console

    with Console(stderr=True).status(f"{words} …") if sys.stderr.isatty() else nullcontext():
        return work(threads, quick=quick)


def _measured(
    chosen: list[Case], names: list[str], known: Mapping[str, Limit], threads: int, *, quick: bool
) -> list[run.Row]:
    from rich.console import Console
    from rich.progress import Progress

    rows = []
    pace = {"rounds": 5, "slice_seconds": 0.05} if quick else {"rounds": 11, "slice_seconds": 0.15}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring", total=len(chosen))
        for case in chosen:
            bar.update(task, description=f"{case.group}: {case.name}")
            rows.append(run.measure(case, names, known, threads, **pace))  # type: ignore[arg-type]
            bar.advance(task)
    return rows
