"""How much code there is, beside the ceilings; exits with 1 above one, or where a part of the page is too long.

Docstrings and blank lines count. A library that nobody can hold in the head is not simple: what comes in pays by what
goes out. A ceiling comes down towards its goal whenever lines are saved, and goes up only for a new subject, such as
the decoders in models/.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
KINDS = "py", "toml", "js", "css"
CEILINGS = {  # the goal, today's ceiling above it, and the files: lines of all that git has of these patterns
    "Python in src": (29_000, 28_700, "src/*.py"),
    "Python in tests": (26_000, 26_000, "tests/*.py"),
    "C++": (7_000, 7_000, "native/*.hpp", "native/*.cpp"),
    "JavaScript": (6_500, 6_500, "page/*.js", "page/*.ts", "page/*.wat"),  # with types and WebAssembly
    "benchmarks, docs": (4_000, 3_400, *(f"{folder}/*.{kind}" for folder in ("benchmarks", "docs") for kind in KINDS)),
}
SHORT = 30  # lines: a module below says little by itself
LONGEST = 400, 80  # lines: a module and a function of the page


def files(*patterns: str) -> list[Path]:
    """What git has of these patterns."""
    done = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).exists()]


def lines(path: Path) -> int:
    """How many lines a file has."""
    return path.read_text(encoding="utf-8").count("\n")


def functions(path: Path) -> list[tuple[int, str]]:
    """The functions of a Python file: how many lines each has, and where it stands."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    each = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    place = path.relative_to(ROOT)
    return [((one.end_lineno or one.lineno) - one.lineno + 1, f"{place}:{one.lineno} {one.name}") for one in each]


def too_long(path: Path) -> list[str]:
    """A module of JavaScript, as prettier writes it, and its functions, where they are too long to be read at once."""
    text = path.read_text(encoding="utf-8").splitlines()
    found = [f"{path.name}: {len(text)} lines"] * (len(text) > LONGEST[0])
    for first, line in enumerate(text):
        if re.search(r"(\bfunction\b.*|=>|\)) \{$", line):
            end = re.match(" *", line)[0] + "}"  # the last line of what begins here
            count = next((place for place, each in enumerate(text[first:], 1) if each.startswith(end)), 0)
            found += [f"{path.name}:{first + 1}: a function of {count} lines"] * (count > LONGEST[1])
    return found


def main() -> int:
    """Print the table; 1 where a ceiling is exceeded."""
    exceeded = False
    print(f"{'':<16}{'lines':>8}{'ceiling':>9}{'goal':>8}{'files':>7}  the longest")
    for name, (goal, ceiling, *patterns) in CEILINGS.items():
        sizes = {path: lines(path) for path in files(*patterns)}
        total, longest = sum(sizes.values()), max(sizes, key=lambda path: sizes[path])
        exceeded |= total > ceiling
        mark = "  above the ceiling" if total > ceiling else ""
        where = f"{longest.relative_to(ROOT)} {sizes[longest]}{mark}"
        print(f"{name:<16}{total:>8,}{ceiling:>9,}{goal:>8,}{len(sizes):>7}  {where}")
    source = [path for path in files("src/*.py") if path.name not in ("__init__.py", "__main__.py")]
    short = [path for path in source if lines(path) < SHORT]
    print(f"modules below {SHORT} lines in src: {len(short)}", *(path.relative_to(ROOT / "src") for path in short))
    longest_function = max(function for path in source for function in functions(path))
    print(f"the longest function in src: {longest_function[0]} lines, {longest_function[1]}")
    long = [each for path in files("page/src/*.js") for each in too_long(path)]
    print(*long, sep="\n", end="\n" * bool(long))
    return int(exceeded or bool(long))


if __name__ == "__main__":
    sys.exit(main())
