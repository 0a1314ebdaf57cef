"""What a benchmark run saved, written as Markdown: for docs/performance.md, and the README in Chinese too."""

import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.cases import Case
from benchmarks.limits import READS

Data = dict[str, Any]  # of bench.json
_WORDS = {
    "en": {
        "measured": "Speeds and shares were measured with `{command}` on {date}: {machine}.",
        "limits": "Limits measured in the same run: {limits}.",
        "rate": "{name} ({by}) {rate:.0f} G multiply-adds/s",
        "read": "{name} {rate:.0f} GB/s",
        "apart": ", ",
    },
    "zh": {
        "measured": "速度和占比于 {date} 用 `{command}` 测得：{machine}。",
        "limits": "同一次运行中测得的上限：{limits}。",
        "rate": "{name}（{by}）每秒 {rate:.0f} G 次乘加",
        "read": "{name}每秒 {rate:.0f} GB",
        "apart": "，",
    },
}
_IN_CHINESE = {
    "product": "矩阵乘积",
    "multiply-adds": "乘加",
    READS: "读内存",
    "processor": "处理器",
    "threads": "线程数",
    "cores": "核心数",
    "instruction set": "指令集",
}


def measured(data: Data, language: str) -> list[str]:
    """By which command, when and on what machine, and the machine's limits: a sentence each."""
    words = _WORDS[language]
    wanted = ["processor", "threads", "cores", "instruction set", "python", "clearhead", "numpy"]
    wanted += ["torch", "onnxruntime"]
    shown = [f"{_named(name, language)} {data['machine'][name]}" for name in wanted if name in data["machine"]]
    limits = [
        words["read" if name == READS else "rate"].format(
            name=_named(name, language), by=limit["by"], rate=limit["rate"] / 1e9
        )
        for name, limit in data["limits"].items()
    ]
    apart = words["apart"]
    first = words["measured"].format(command=data["command"], date=data["date"], machine=apart.join(shown))
    return [first, words["limits"].format(limits=apart.join(limits))]


def cases(data: Data) -> Iterator[str]:
    """The lines of the table of cases, with the shares of their limits, and of the summary by group."""
    head = ("group", "case", "clearhead, ms", "limit", "clearhead's share", "PyTorch's share", "times as fast as")
    rows = []
    for row in data["rows"]:
        case = Case(**row["case"])
        ratios = ", ".join(f"{name} {value:.2f}" for name, value in row["ratios"].items())
        local = f"{row['seconds']['clearhead'] * 1e3:.3f}"
        shares = [share(row["shares"].get(name)) for name in ("clearhead", "torch")]
        rows.append((case.group, case.name, local, row["limit"] or "-", *shares, ratios))
    yield from table(head, rows, [True, True, False, True, False, False, True])
    yield ""
    results = [(s["group"], s["peer"], f"{s['mean']:.2f}", f"{s['worst']:.2f}") for s in summary(data["rows"])]
    yield from table(("group", "peer", "geometric mean", "worst"), results, [True, True, False, False])


def summary(rows: Sequence[Data]) -> list[Data]:
    """The geometric mean and the worst ratio for each group and peer."""
    results = []
    for group in dict.fromkeys(row["case"]["group"] for row in rows):
        members = [row["ratios"] for row in rows if row["case"]["group"] == group]
        for peer in dict.fromkeys(name for ratios in members for name in ratios):
            ratios = [one[peer] for one in members if peer in one]
            results.append({"group": group, "peer": peer, "mean": geometric_mean(ratios), "worst": min(ratios)})
    return results


def share(of_limit: float | None) -> str:
    """A share of a limit for a cell; "-" where it is not known."""
    return "-" if of_limit is None else f"{of_limit:.0%}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]], left: Iterable[bool]) -> Iterator[str]:
    """The lines of a Markdown table; `left` says which columns hold words."""
    yield _line(head)
    yield _line("---" if words else "---:" for words in left)
    yield from map(_line, rows)


def _line(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |"


def _named(name: str, language: str) -> str:
    """A limit's name, or that of a fact about the machine, in the language."""
    if language == "en":
        return name
    for english, chinese in _IN_CHINESE.items():
        name = re.sub(rf"\b{english}\b", chinese, name)
    return name
