"""A model of sharded attention's time and bytes per rank, up to 1,024 ranks and 10 million tokens.

    python benchmarks/scale.py --check      compare the model's bytes with those counted on 2 to 4 gloo processes
    python benchmarks/scale.py --write      measure the kernel here, check, and write docs/scale.svg and the tables

The model uses the shapes, one kernel speed and one link speed. For a causal forward pass of one layer in zigzag order:
gather waits for its messages and then computes; ring hides each step's message behind its computation;
a window needs the keys before a rank's first query and no others; merge moves queries, for decoding.
"""

import argparse
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parents[1]
METHODS = ("gather", "ring")
LATENCY = 10e-6  # seconds until a message begins to arrive


@dataclass(frozen=True)
class Layer:
    heads: int
    kv_heads: int
    d: int
    itemsize: int
    statistic: int = 4  # bytes of a partial output's number


@dataclass(frozen=True)
class Machine:
    name: str
    rate: float  # operations per second in attention, forward
    link: float  # bytes per second that a rank receives


LLAMA = Layer(heads=32, kv_heads=8, d=128, itemsize=2)


def key_bytes(layer: Layer) -> int:
    return 2 * layer.kv_heads * layer.d * layer.itemsize


def received(n: int, ranks: int, layer: Layer) -> int:
    """Bytes that the busiest rank receives in a causal forward pass; equal shards, in zigzag order."""
    return (n - n // ranks) * key_bytes(layer)


def received_window(n: int, ranks: int, layer: Layer, window: int) -> int:
    """As `received`, with a window of keys before each query; contiguous shards, method gather."""
    return min(window, n - n // ranks) * key_bytes(layer)


def received_decoding(method: str, n: int, ranks: int, layer: Layer) -> int:
    """As `received`, for decoding one new query on the last rank, with keys on all ranks."""
    if method == "merge":
        return (ranks - 1) * layer.heads * (layer.d + 1) * layer.statistic
    return received(n, ranks, layer)


def operations(n: int, ranks: int, layer: Layer, window: int | None = None) -> float:
    """Operations per rank: two products, of d multiplications and additions each, for each visible pair."""
    pairs = n * n / 2 if window is None else n * window
    return 4 * layer.heads * layer.d * pairs / ranks


def seconds(method: str, n: int, ranks: int, layer: Layer, machine: Machine) -> float:
    compute = operations(n, ranks, layer) / machine.rate
    moved = received(n, ranks, layer) / machine.link
    if method == "ring":
        step = moved / max(1, ranks - 1) + LATENCY
        return compute / ranks + (ranks - 1) * max(compute / ranks, step)
    return compute + moved + LATENCY


def seconds_window(n: int, ranks: int, layer: Layer, window: int, machine: Machine) -> float:
    moved = received_window(n, ranks, layer, window) / machine.link
    return operations(n, ranks, layer, window) / machine.rate + moved + LATENCY


def cases() -> list[tuple[str, str, str, dict[str, object]]]:
    """The cases that are counted: name, method, the ranks that have queries, and the rules."""
    zigzag = {"causal": True, "layout": "zigzag"}
    results: list[tuple[str, str, str, dict[str, object]]] = [
        (f"{m}, causal, zigzag", m, "all", zigzag) for m in METHODS
    ]
    results.append(("gather, window 24", "gather", "all", {"causal": True, "window": (24, None)}))
    decoding = {"causal": True, "query_offset": 239}
    return results + [(f"{method}, decoding", method, "last", decoding) for method in ("gather", "merge")]


def expected(name: str, method: str, ranks: int, layer: Layer) -> int:
    if "window" in name:
        return received_window(240, ranks, layer, 24)
    if "decoding" in name:
        return received_decoding(method, 240, ranks, layer)
    return received(240, ranks, layer)


SMALL = Layer(heads=12, kv_heads=12, d=8, itemsize=4)


def count(rank: int, world: int, port: int) -> None:
    """One process of `check`: prints the bytes received in each case, and the time of one agreement among ranks."""
    import torch
    import torch.distributed as dist

    import clearhead as ch

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    bytes_of: list[int] = []
    real = dist.P2POp

    def watched(how: object, memory: torch.Tensor, *more: object) -> object:
        if how is dist.irecv:
            bytes_of.append(memory.numel() * memory.element_size())
        return real(how, memory, *more)

    dist.P2POp = watched
    results = []
    for name, method, queries, rules in cases():
        length = 240 // world if queries == "all" else int(rank == world - 1)
        q = torch.ones(1, SMALL.heads, length, SMALL.d)
        k = torch.ones(1, SMALL.kv_heads, 240 // world, SMALL.d)
        bytes_of.clear()
        ch.distributed.attention(q, k, k, method=method, **rules)
        most = torch.tensor([sum(bytes_of)])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        results.append((name, method, int(most)))
    start = time.perf_counter()
    for _ in range(50):
        ch.distributed.plan(q, k, k)
    took = (time.perf_counter() - start) / 50
    if rank == 0:
        for name, method, most in results:
            print(f"{name}\t{method}\t{most}")
        print(f"agreement\t\t{took}")
    dist.barrier()
    dist.destroy_process_group()


def check() -> list[str]:
    """Table rows with the model's and the counted bytes of every case on 2 to 4 processes; they must be equal."""
    rows, agreements = [], []
    for world in (2, 3, 4):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        call = [sys.executable, __file__, "--count"]
        started = [
            subprocess.Popen([*call, str(rank), str(world), str(port)], stdout=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        said = [rank.communicate(timeout=120)[0] for rank in started]
        for line in said[0].splitlines():
            name, method, shown = line.split("\t")
            if name == "agreement":
                agreements.append(f"{1000 * float(shown):.1f} ms on {world}")
                continue
            model = expected(name, method, world, SMALL)
            rows.append(f"| {name} | {world} | {model:,} | {int(shown):,} |")
            assert model == int(shown), rows[-1]
    assert len(rows) == 3 * len(cases()), "a process said less than it should"
    print("\n".join(rows))
    print("agreeing, here:", ", ".join(agreements))
    return rows


def measured_rate() -> float:
    """Operations per second of the kernel on this machine: bfloat16, causal, 8,192 tokens."""
    import torch

    import clearhead as ch

    q, k, v = (torch.randn(1, heads, 8192, LLAMA.d, dtype=torch.bfloat16) for heads in (4, 1, 1))
    ch.attention(q, k, v, causal=True)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        ch.attention(q, k, v, causal=True)
        times.append(time.perf_counter() - start)
    return operations(8192, 1, Layer(4, 1, LLAMA.d, 2)) / min(times)


def tables(machines: list[Machine]) -> list[str]:
    lines = []
    for machine in machines:
        lines += ["", f"### {machine.name}", ""]
        lines += [
            "| tokens | ranks | compute | gather | ring | window 4,096 |",
            "| ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        for n in (131_072, 1_048_576, 10_485_760):
            for ranks in (8, 32, 256, 1024):
                row = [f"{n:,}", f"{ranks:,}", written(operations(n, ranks, LLAMA) / machine.rate)]
                row += [written(seconds(method, n, ranks, LLAMA, machine)) for method in METHODS]
                row.append(written(seconds_window(n, ranks, LLAMA, 4096, machine)))
                lines.append(f"| {' | '.join(row)} |")
    return lines


def bytes_table() -> list[str]:
    lines = ["| tokens | ranks | gather, ring | window 4,096 | decoding: gather | decoding: merge |"]
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for n in (131_072, 1_048_576, 10_485_760):
        for ranks in (8, 32, 256, 1024):
            row = [f"{n:,}", f"{ranks:,}", size(received(n, ranks, LLAMA))]
            row.append(size(received_window(n, ranks, LLAMA, 4096)))
            row += [size(received_decoding(method, n, ranks, LLAMA)) for method in ("gather", "merge")]
            lines.append(f"| {' | '.join(row)} |")
    return lines


def written(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{1000 * value:,.1f} ms" if value >= 1e-3 else f"{1e6 * value:,.0f} µs"


def size(count: int) -> str:
    return (
        f"{count / 1e9:,.1f} GB"
        if count >= 1e9
        else f"{count / 1e6:,.1f} MB"
        if count >= 1e6
        else f"{count / 1e3:,.0f} kB"
    )


def plot(machine: Machine, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "clearhead"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    counts = [2**i for i in range(1, 11)]
    for panel, n in zip(axes, (1_048_576, 10_485_760), strict=True):
        panel.loglog(counts, [operations(n, p, LLAMA) / machine.rate for p in counts], "k:", label="compute alone")
        for method, style in zip(METHODS, ("s-", "o-"), strict=True):
            times = [seconds(method, n, p, LLAMA, machine) for p in counts]
            panel.loglog(counts, times, style, ms=3, lw=1, label=method)
        panel.loglog(
            counts, [seconds_window(n, p, LLAMA, 4096, machine) for p in counts], "v-", ms=3, lw=1, label="window 4,096"
        )
        panel.set_title(f"{n:,} tokens", fontsize=9)
        panel.set_xlabel("ranks")
    axes[0].set_ylabel("seconds, one layer forward")
    axes[0].legend(fontsize=7, frameon=False)
    figure.suptitle(machine.name, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def write(rows: list[str]) -> None:
    rate = measured_rate()
    machines = [
        Machine("GPUs at 600 TFLOP/s with links of 50 GB/s (published speeds, not measured here)", 600e12, 50e9),
        Machine(f"This machine's two cores, {rate / 1e9:.0f} GFLOP/s measured, with links of 1.25 GB/s", rate, 1.25e9),
    ]
    parts = {
        "bytes": bytes_table(),
        "times": tables(machines),
        "check": ["| case | processes | model | counted |", "| --- | ---: | ---: | ---: |", *rows],
    }
    page = HERE / "docs" / "scale.md"
    text = page.read_text(encoding="utf-8")
    for name, lines in parts.items():
        before, rest = text.split(f"<!-- {name} -->\n")
        after = rest.split(f"<!-- end of {name} -->")[1]
        inner = "\n".join(lines).strip()
        text = f"{before}<!-- {name} -->\n\n{inner}\n\n<!-- end of {name} -->{after}"
    page.write_text(text, encoding="utf-8")
    plot(machines[0], HERE / "docs" / "scale.svg")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--count", nargs=3, type=int, metavar=("RANK", "WORLD", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        count(*options.count)
    elif options.check or options.write:
        rows = check()
        if options.write:
            write(rows)
    else:
        print("\n".join(bytes_table()))
