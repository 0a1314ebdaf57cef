"""Refuses names of the house's old dialect in code: say what a thing is, in the field's words.

`own`, `found`, `mine`, `told` and `given` name where a thing came from, not what it is (local, result, rows, upstream
do), and `bend`, `bent` and `slant` mean derivatives (slope, tangent). They are refused as a word of a name too:
`_given`, `ownKeys`, `Found`. `at` is refused only as a whole name, since `rowAt` says what it does. Comments, texts and
attributes of other objects than `self` (`x.at[…]`, `np.add.at`) may say them, and names of tests, which are sentences.
Exits with 1 where one of them is a name.
"""

import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIALECT = {"own", "found", "mine", "told", "given", "bend", "bent", "slant"}
EXCEPTIONS = {"src/clearhead/diagnosing/verdict.py": {"told"}}  # Diagnosis.told is public
ERRORS = re.compile(r"\w+NotFoundError")  # of Python and other libraries
HYPOTHESIS = re.compile(r"from hypothesis import [^\n]*\bgiven\b")  # its decorator
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of snake_case, CamelCase or CAPITALS
CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`|(?P<name>(?<![\w.])[A-Za-z_]\w*)""",
    re.DOTALL,
)


def python_names(path: Path) -> Iterator[tuple[int, str]]:
    """The names in Python, with their lines."""
    before = ["", ""]
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.NAME and (before[1] != "." or before[0] == "self"):
                yield token.start[0], token.string
            if token.type not in (tokenize.NL, tokenize.COMMENT):
                before = [before[1], token.string]


def other_names(path: Path) -> Iterator[tuple[int, str]]:
    """The names in C++ or JavaScript, outside of comments and texts."""
    text = path.read_text(encoding="utf-8")
    for match in CODE.finditer(text):
        if match["name"]:
            yield text.count("\n", 0, match.start()) + 1, match["name"]


def refused(name: str) -> bool:
    """Is the name, or one of its words, of the dialect?"""
    if name.startswith("test_") or ERRORS.fullmatch(name):
        return False
    return name == "at" or any(word.lower() in DIALECT for word in WORD.findall(name))


def main() -> int:
    """Print where a name of the dialect stands; 1 where one does."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    problems = []
    for name in listed.split("\0"):
        path = ROOT / name
        read = {".py": python_names, ".js": other_names, ".hpp": other_names, ".cpp": other_names}.get(path.suffix)
        if read is None or not path.exists() or name.startswith("src/clearhead/view/attention"):
            continue
        allowed = EXCEPTIONS.get(name, set())
        if HYPOTHESIS.search(path.read_text(encoding="utf-8")):
            allowed = allowed | {"given"}
        problems += [f"{name}:{line}: `{word}`" for line, word in read(path) if refused(word) and word not in allowed]
    print("\n".join(problems), end="\n" if problems else "")
    print(f"{len(problems)} names with a word of the dialect: {', '.join(sorted(DIALECT))}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
