"""Time clearhead against other libraries, taking turns; run it in a checkout: python -m benchmarks."""

import argparse
import sys
from collections.abc import Sequence

from clearhead.engines.threads import get_num_threads, set_num_threads
from clearhead.errors import ClearheadError
from clearhead.report import streams

EXAMPLES = """examples:
  python -m benchmarks --quick
  python -m benchmarks --peers torch --only full,causal
  python -m benchmarks --only cases --save benchmarks/results/today
  python -m benchmarks --only faithful --items 3 --parts 12,36
"""


def main(inputs: Sequence[str] | None = None) -> int:
    """Run the benchmarks; returns the exit code: 0, 2 for bad input or unwritable results, 130 when interrupted."""
    values = command_line().parse_args(inputs)
    try:
        return _run(values)
    except ClearheadError as error:
        streams.complain("benchmarks", error.one_line())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 2


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time clearhead against its peers, taking turns.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds: about a minute")
    parser.add_argument("--peers", metavar="A,B", help="only these peers; default: all that are installed")
    parser.add_argument("--only", metavar="A,B", help="only these groups; cases: all that are made of cases")
    parser.add_argument("--threads", type=int, metavar="N", help="threads for everybody; default: all cores")
    parser.add_argument("--save", metavar="DIR", help="write bench.json there")
    parser.add_argument("--items", type=int, metavar="N", help="faithful: items of each task")
    parser.add_argument("--parts", metavar="A,B", help="faithful: parts of each item; default: 12,36,100")
    return parser


def _run(inputs: argparse.Namespace) -> int:
    if inputs.threads is not None:
        set_num_threads(inputs.threads)  # raises if the number is invalid
    from benchmarks.command import bench

    asked = {"items": inputs.items, "parts": inputs.parts}
    chosen = {"quick": inputs.quick, "chosen": inputs.peers, "only": inputs.only, "save": inputs.save}
    bench(**chosen, threads=get_num_threads(), faithful=asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
