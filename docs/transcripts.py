"""Run the README's console blocks: python docs/transcripts.py writes their output anew, --check compares.

A block is ```console; each line that starts with "$ " is run by the shell as written, at 80 columns and without colour.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
ROUNDING = re.compile(r"\d(\.\d+)?e-\d+")  # rounding errors differ from one processor to the next


def run(command: str) -> str:
    """What the command prints."""
    plain = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLORTERM")}
    plain |= {"COLUMNS": "80", "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=plain,
        cwd=README.parent,
        check=False,
    )
    return "".join(line.rstrip() + "\n" for line in (done.stdout + done.stderr).splitlines())


def renewed(text: str) -> str:
    """The README with every console block's output run anew."""

    def block(found: re.Match[str]) -> str:
        commands = [line for line in found.group(1).splitlines() if line.startswith("$ ")]
        return "```console\n" + "".join(f"{line}\n{run(line[2:])}" for line in commands) + "```"

    return BLOCK.sub(block, text)


def main() -> int:
    """Write the README, or compare it with what the commands print now."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 when a block is not what its command prints now")
    check = parser.parse_args().check
    old = README.read_text(encoding="utf-8")
    new = renewed(old)
    if not check:
        README.write_text(new, encoding="utf-8")
    elif ROUNDING.sub("ε", old) != ROUNDING.sub("ε", new):
        print("the README's transcripts are not current: python docs/transcripts.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
