"""Run the console blocks of the READMEs and of docs: python docs/transcripts.py writes their output, --check compares.

--quick leaves blocks as they are that run a real model in Chinese: the same runs in English are compared.

A block is ```console; each line that starts with "$ " is run by the shell as written, at 80 columns and without colour.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-\d+)?")


@cache
def shell(command: str, given: str = "") -> tuple[str, str]:
    """What the command prints of this input, and on standard error."""
    plain = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLORTERM")}
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}"
    plain |= {"COLUMNS": "80", "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "PATH": path}
    bash = ["bash", "-c", command]
    done = subprocess.run(bash, input=given, capture_output=True, encoding="utf-8", env=plain, cwd=ROOT, check=False)
    return done.stdout, done.stderr


def run(command: str) -> str:
    """What the command prints. What is piped through several filters runs once."""
    first, _, rest = command.partition(" | ")
    out, error = shell(first)
    out, more = shell(rest, out) if rest else (out, "")
    return "".join(line.rstrip() + "\n" for line in (out + error + more).splitlines())


def renewed(text: str, *, quick: bool) -> str:
    """The page with the output of every console block's commands as it is now."""

    def block(result: re.Match[str]) -> str:
        commands = [line for line in result.group(1).splitlines() if line.startswith("$ ")]
        if quick and any("--model" in command and "--lang zh" in command for command in commands):
            return result.group()
        return "```console\n" + "".join(f"{line}\n{run(line[2:])}" for line in commands) + "```"

    return BLOCK.sub(block, text)


def alike(old: str, new: str) -> bool:
    """Are they the same, but for what differs from one processor to the next: last digits, and errors such as 3e-17?"""
    numbers = zip(NUMBER.findall(old), NUMBER.findall(new), strict=False)
    return NUMBER.split(old) == NUMBER.split(new) and all(a == b or _near(a, b) for a, b in numbers)


def _near(a: str, b: str) -> bool:
    if "e-" in a or "e-" in b:
        return "e-" in a and "e-" in b
    digits = len(a.partition(".")[2])
    return digits > 0 and digits == len(b.partition(".")[2]) and abs(float(a) - float(b)) < 1.5 * 10**-digits


def main() -> int:
    """Write the pages, or compare them with what the commands print now."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 when a block is not what its command prints now")
    parser.add_argument("--quick", action="store_true", help="not the commands that run a real model in Chinese")
    options = parser.parse_args()
    check = options.check
    stale = []
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = renewed(old, quick=options.quick)
        if not check:
            page.write_text(new, encoding="utf-8")
        elif not alike(old, new):
            stale.append(page.name)
    if stale:
        print(f"not current: {', '.join(stale)}; run python docs/transcripts.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
