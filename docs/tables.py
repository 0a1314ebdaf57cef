"""Fill the READMEs' table of speed and error: python docs/tables.py writes it, --check compares.

Speeds come from the file that the benchmark wrote; errors are the last two rows of the table that benchmarks/errors.py
prints, as docs/performance.md has it.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks/results/2026-11-21/bench.json"
READMES = {"en": HERE.parent / "README.md", "zh": HERE.parent / "README.zh-CN.md"}
MARKS = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)
HEADS = {
    "en": ("", "compared with", "mean", "worst"),
    "zh": ("", "对比对象", "平均", "最差"),
}
OUTPUT_ALONE = "clearhead"  # as a peer: the same engine, asked for the output alone
PEERS = {
    "torch": ("PyTorch", "PyTorch"),
    "onnxruntime": ("onnxruntime", "onnxruntime"),
    "materialised": ("PyTorch, weights stored", "PyTorch，存下全部权重"),
}
SPEEDS: dict[tuple[str, str], tuple[str, str]] = {
    ("full", "torch"): ("speed, float32, 512 to 8,192 tokens", "速度，float32，512 至 8,192 个词元"),
    ("full", "onnxruntime"): ("the same", "同上"),
    ("causal", "torch"): ("speed, causal, float32, 256 to 8,192 tokens", "速度，因果，float32，256 至 8,192 个词元"),
    ("causal", "onnxruntime"): ("the same", "同上"),
    ("bfloat16", "torch"): ("speed, bfloat16", "速度，bfloat16"),
    ("backward", "torch"): ("speed, gradients", "速度，梯度"),
    ("backward causal", "torch"): ("speed, gradients, causal", "速度，梯度，因果"),
    ("decode", "torch"): ("speed, decoding one query", "速度，解码单个查询"),
    ("decode grouped", "torch"): ("speed, decoding, 4 query heads per key head", "速度，解码，每个键头对应 4 个查询头"),
    ("tiny", "torch"): ("speed, 2 or 4 tokens", "速度，2 或 4 个词元"),
    ("observe", "torch"): ("speed, output and statistics", "速度，输出加统计量"),
    ("observe", OUTPUT_ALONE): ("the same", "同上"),
    ("observe", "materialised"): ("the same", "同上"),
}
ALONE = {
    ("observe", "torch"): ("PyTorch, output alone", "PyTorch，只算输出"),
    ("observe", OUTPUT_ALONE): ("clearhead, output alone", "clearhead，只算输出"),
}
ERROR = ("error of the output, {dtype}", "输出的误差，{dtype}")


def speed(rows: list[dict[str, Any]], group: str, peer: str) -> tuple[float, float]:
    """The geometric mean and the worst of one group's ratios."""
    members = [row for row in rows if row["case"]["group"] == group]
    if peer == OUTPUT_ALONE:
        ratios = [_output_alone(rows, row["case"]) / row["seconds"]["clearhead"] for row in members]
    else:
        ratios = [row["ratios"][peer] for row in members]
    return geometric_mean(ratios), min(ratios)


def _output_alone(rows: list[dict[str, Any]], case: dict[str, Any]) -> float:
    """Seconds of the same problem where nothing is observed."""
    same = {name: case[name] for name in ("batch", "heads", "queries", "keys", "d", "dtype", "causal", "window")}
    found = [row for row in rows if row["case"]["kind"] == "forward" and same.items() <= row["case"].items()]
    return float(found[0]["seconds"]["clearhead"])


def errors() -> dict[str, tuple[str, str]]:
    """For each dtype the geometric mean and the worst, from docs/performance.md."""
    text = (HERE / "performance.md").read_text(encoding="utf-8")
    table = text[text.index("| deviation of the inputs: 1, 3, 6 |") :].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    found = {line[0]: line[1:] for line in cells}
    means, worst = found["geometric mean"], found["worst"]
    return {dtype: (means[i], worst[i]) for i, dtype in enumerate(cells[0][1:])}


def table(language: str) -> str:
    """The table in one language."""
    at = list(READMES).index(language)
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    lines = [HEADS[language], ("---", "---", "---:", "---:")]
    for (group, peer), label in SPEEDS.items():
        mean, worst = speed(rows, group, peer)
        beside = ALONE.get((group, peer)) or PEERS[peer]
        lines.append((label[at], beside[at], f"{mean:.2f}", f"{worst:.2f}"))
    for dtype, (mean_error, worst_error) in errors().items():
        lines.append((ERROR[at].format(dtype=dtype), PEERS["torch"][at], mean_error, worst_error))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> int:
    """Write the tables, or compare them with the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 when a table is not what the figures give")
    check = parser.parse_args().check
    stale = []
    for language, path in READMES.items():
        old = path.read_text(encoding="utf-8")
        new = MARKS.sub(rf"\g<1>{table(language)}\g<2>", old)
        if not check:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            stale.append(path.name)
    if stale:
        print(f"not current: {', '.join(stale)}; run python docs/tables.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
