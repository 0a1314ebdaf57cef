"""The bench command: choose cases and peers, measure with a progress bar, print the table, save it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.bench import peers, run
from clearhead.bench.cases import Case, cases
from clearhead.bench.limits import Limits, limits, machine
from clearhead.errors import FileError, unknown

if TYPE_CHECKING:
    from rich.console import Console


def bench(*, quick: bool, chosen: str | None, only: str | None, save: str | None, threads: int) -> None:
    """Measure and report; words and bars go to standard error, the table to standard output."""
    from rich.console import Console

    installed = peers.available()
    names = installed if chosen is None else [name for name in chosen.split(",") if name]
    for name in names:
        if name not in installed:
            raise unknown("peer", name, installed)
    every = cases(quick=quick)
    groups = list(dict.fromkeys(case.group for case in every))
    wanted = groups if only is None else only.split(",")
    for group in wanted:
        if group not in groups:
            raise unknown("group", group, groups)
    found = machine(threads)
    limit = limits(threads)
    rows = _measured([case for case in every if case.group in wanted], names, limit, threads, quick=quick)
    show(Console(highlight=False, markup=False), rows, found, limit)
    if save is not None:
        _save(Path(save), rows, found, limit)


def show(console: "Console", rows: list[run.Row], found: dict[str, str | int], limit: Limits) -> None:
    """The table: milliseconds, share of the limit, and how many times as fast as each peer."""
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows for name in row.ratios))
    table = Table("case", "ms", "of limit", *names, box=None, pad_edge=False)
    group = ""
    for row in rows:
        if row.case.group != group:
            group = row.case.group
            table.add_row(f"[{group}]")
        ratios = [f"{row.ratios[name]:.2f}" if name in row.ratios else "-" for name in names]
        table.add_row(f" {row.case.name}", f"{row.seconds['clearhead'] * 1e3:.3f}", f"{row.share:.0%}", *ratios)
    console.print(table)
    console.print("\ntimes as fast: geometric mean / worst")
    for line in run.summary(rows):
        console.print(f"  {line['group']:<26} {line['peer']:<13} {line['mean']:6.2f} / {line['worst']:.2f}")
    peak, read = limit.multiply_adds / 1e9, limit.bytes_read / 1e9
    console.print(f"\nlimits: {peak:.0f} G multiply-adds/s (float32), {read:.0f} GB/s read")
    console.print("; ".join(f"{name} {value}" for name, value in found.items()), soft_wrap=True)


def _measured(chosen: list[Case], names: list[str], limit: Limits, threads: int, *, quick: bool) -> list[run.Row]:
    from rich.console import Console
    from rich.progress import Progress

    rows = []
    pace = {"rounds": 5, "slice_seconds": 0.05} if quick else {"rounds": 11, "slice_seconds": 0.15}
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("measuring", total=len(chosen))
        for case in chosen:
            bar.update(task, description=f"{case.group}: {case.name}")
            rows.append(run.measure(case, names, limit, threads, **pace))  # type: ignore[arg-type]
            bar.advance(task)
    return rows


def _save(folder: Path, rows: list[run.Row], found: dict[str, str | int], limit: Limits) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(run.as_json(rows, found, limit), encoding="utf-8")
        (folder / "bench.csv").write_text(run.as_csv(rows), encoding="utf-8")
        (folder / "bench.md").write_text(run.as_markdown(rows, found, limit), encoding="utf-8")
    except OSError as error:
        raise FileError(f"{folder} cannot be written: {error.strerror}.") from None
    run.plot(rows, folder / "bench.svg")
