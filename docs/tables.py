"""Fill the tables of speed in the READMEs and in docs: python docs/tables.py writes, --check compares.

Speeds and shares come from the newest file that `python -m benchmarks --save` wrote below benchmarks/results; errors
are the last two rows of the table that benchmarks/errors.py prints, as docs/performance.md has it. What statistics
there are is in clearhead/core/statistics.py.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from textwrap import fill
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks import written  # noqa: E402
from clearhead.core.statistics import STATISTICS, listed  # noqa: E402

RESULTS = HERE.parent / "benchmarks" / "results"
READMES = {"en": HERE.parent / "README.md", "zh": HERE.parent / "README.zh-CN.md"}
PAGE = HERE / "performance.md"
HEADS = {
    "en": ("", "compared with", "mean", "worst", "clearhead's share", "the other's"),
    "zh": ("", "对比对象", "平均", "最差", "clearhead 占比", "对方占比"),
}
OUTPUT_ALONE = "clearhead"  # as a peer: the same engine, asked for the output alone
SPEEDS = {
    ("full", "torch"): "speed, float32, 512 to 8,192 tokens",
    ("full", "onnxruntime"): "the same",
    ("causal", "torch"): "speed, causal, float32, 256 to 8,192 tokens",
    ("causal", "onnxruntime"): "the same",
    ("bfloat16", "torch"): "speed, bfloat16",
    ("backward", "torch"): "speed, gradients",
    ("backward causal", "torch"): "speed, gradients, causal",
    ("decode", "torch"): "speed, decoding one query",
    ("decode grouped", "torch"): "speed, decoding, 4 query heads per key head",
    ("tiny", "torch"): "speed, 2 or 4 tokens",
    ("observe", "torch"): "speed, output and five statistics",
    ("observe", OUTPUT_ALONE): "the same",
    ("observe", "materialised"): "the same",
}
PEERS = {"torch": "PyTorch", "onnxruntime": "onnxruntime", "materialised": "PyTorch, weights stored"}
PEERS[OUTPUT_ALONE] = "clearhead, output alone"
ERROR = "error of the output, {dtype}"
CHINESE = {  # the READMEs show these rows, and no others
    SPEEDS["full", "torch"]: "速度，float32，512 至 8,192 个词元",
    SPEEDS["observe", "torch"]: "速度，输出加五项统计量",
    ERROR.format(dtype="float32"): "输出的误差，float32",
    "PyTorch, output alone": "PyTorch，只算输出",
}


def newest(results: Path = RESULTS) -> dict[str, Any]:
    """The newest results that have cases, of a run of all groups."""
    values = [json.loads(path.read_text(encoding="utf-8")) for path in results.glob("*/bench.json")]
    return max(
        (data for data in values if data["rows"] and "--only" not in data["command"]), key=lambda data: data["date"]
    )


def compared(rows: list[dict[str, Any]], group: str, peer: str) -> Iterator[tuple[float, float | None, float | None]]:
    """For each case of a group that has this peer: the ratio, and the shares of the limit, ours and the peer's."""
    for row in rows:
        if row["case"]["group"] != group:
            continue
        local = row["shares"].get("clearhead")
        if peer == OUTPUT_ALONE:
            other = _output_alone(rows, row["case"])
            ratio = other["seconds"]["clearhead"] / row["seconds"]["clearhead"]
            yield ratio, local, other["shares"].get("clearhead")
        elif peer in row["ratios"]:
            yield row["ratios"][peer], local, row["shares"].get(peer)


def _output_alone(rows: list[dict[str, Any]], case: dict[str, Any]) -> dict[str, Any]:
    """The row of the same problem where nothing is observed."""
    same = {name: case[name] for name in ("batch", "heads", "queries", "keys", "d", "dtype", "causal", "window")}
    return next(row for row in rows if row["case"]["kind"] == "forward" and same.items() <= row["case"].items())


def _mean_share(shares: tuple[float | None, ...]) -> str:
    known = [one for one in shares if one is not None]
    return written.share(geometric_mean(known) if len(known) == len(shares) else None)


def errors() -> dict[str, tuple[str, str]]:
    """For each dtype the geometric mean and the worst, from docs/performance.md."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("| deviation of the inputs: 1, 3, 6 |") :].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    results = {line[0]: line[1:] for line in cells}
    means, worst = results["geometric mean"], results["worst"]
    return {dtype: (means[i], worst[i]) for i, dtype in enumerate(cells[0][1:])}


def figures(data: dict[str, Any], readme: str | None = None) -> str:
    """The table of means, or of the README in this language, and below it where it was measured."""
    language = readme or "en"
    lines = []
    for (group, peer), label in SPEEDS.items():
        result = list(compared(data["rows"], group, peer))
        if result:
            ratios, *shares = zip(*result, strict=True)
            speeds = [f"{x:.2f}" for x in (geometric_mean(ratios), min(ratios))]
            beside = "PyTorch, output alone" if (group, peer) == ("observe", "torch") else PEERS[peer]
            lines.append((label, beside, *speeds, *map(_mean_share, shares)))
    lines += [(ERROR.format(dtype=dtype), PEERS["torch"], *worse, "", "") for dtype, worse in errors().items()]
    if readme:
        lines = [line for line in lines if line[0] in CHINESE]
    if readme == "zh":
        lines = [tuple(CHINESE.get(cell, cell) for cell in line) for line in lines]
    table = written.table(HEADS[language], lines, [True, True, False, False, False, False])
    where = list(_paragraphs(data, language))
    return "\n".join([*table, "", *(where[:2] if readme else where)]) + "\n"


def cases(data: dict[str, Any]) -> str:
    """The tables of all cases, for the page on performance."""
    return "\n".join([*_paragraphs(data, "en"), *written.cases(data)]) + "\n"


def statistics() -> str:
    """The table of every statistic, for the page on matrices."""
    asked = {"flag": "True", "count": "8", "size": "(256, 256)", "labels": "(query_labels, key_labels)"}
    lines = []
    for name in listed():
        each = STATISTICS[name]
        ask = "`v`" if each.asked == "v" else f"`{name}={asked[each.asked]}`"
        definition = re.sub(r"([\\*_|])", r"\\\1", each.definition)
        lines.append(
            (f"`{name}`", ask, definition, ", ".join(each.axes), "first" if each.computed == "rows" else "second")
        )
    head = ("statistic", "ask for it by", "definition", "axes", "pass")
    return "\n".join(written.table(head, lines, [True] * 5)) + "\n"


def _paragraphs(data: dict[str, Any], language: str) -> Iterator[str]:
    for text in written.measured(data, language):
        whole = re.sub("`[^`]*`", lambda code: code.group().replace(" ", "\0"), text)  # code stays on one line
        folded = fill(whole, 120, break_long_words=False, break_on_hyphens=False) if language == "en" else whole
        yield from (folded.replace("\0", " "), "")


def filled(text: str, mark: str, table: str) -> str:
    """The text with the table between its marks, <!-- mark --> and <!-- end of mark -->."""
    between = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end of {mark} -->)", re.DOTALL)
    return between.sub(lambda result: f"{result[1]}{table}{result[2]}", text)


def main() -> int:
    """Write the tables, or compare them with the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 when a table is not what the figures give")
    check = parser.parse_args().check
    stale, data = [], newest()
    readmes = [(path, "figures", figures(data, language)) for language, path in READMES.items()]
    speeds = [(PAGE, "figures", figures(data)), (PAGE, "cases", cases(data))]
    for path, mark, table in (*readmes, *speeds, (HERE / "matrix.md", "statistics", statistics())):
        old = path.read_text(encoding="utf-8")
        new = filled(old, mark, table)
        if not check:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            stale.append(str(path.relative_to(HERE.parent)))
    if stale:
        print(f"not current: {', '.join(stale)}; run python docs/tables.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
