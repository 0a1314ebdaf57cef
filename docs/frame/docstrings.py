"""A docstring as Markdown.

Docstrings here are plain text with four forms: paragraphs, lists of names with what they mean in a second column,
tables of several columns, and examples.
"""

import re

ENTRY = re.compile(r"(\S(?:.*?\S)?) {2,}(\S.*)")
SENTENCES = ("Returns", "Raises", "Gives", "Source", "O(", "Time ")
WIDTH = 110  # a line of a method's docstring


def markdown(text: str, *, example_first: bool = False) -> str:
    """The docstring with its forms as Markdown has them; an example that nothing leads up to may go below the first."""
    blocks = [block for block in re.split(r"\n\s*\n", text.strip("\n")) if block.strip()]
    example = next((place for place, block in enumerate(blocks) if block.lstrip().startswith(">>>")), 0)
    if example_first and example > 1 and not blocks[example - 1].rstrip().endswith(":"):
        end = example + 1
        while end < len(blocks) and blocks[end].lstrip().startswith(">>>"):
            end += 1
        blocks = [blocks[0], *blocks[example:end], *blocks[1:example], *blocks[end:]]
    return "\n\n".join(_block(block.splitlines()) for block in blocks) + "\n"


def _block(lines: list[str]) -> str:
    if lines[0].lstrip().startswith(">>>"):
        return _fenced("pycon", lines)
    if lines[0].startswith((" ", "├", "└")) or any(line.startswith(("├", "└")) for line in lines):
        return _fenced("text", lines)
    column = next((result.start(2) for line in lines if (result := ENTRY.fullmatch(line))), None)
    if column is None:
        return paragraph(lines)
    parts: list[str] = []
    for entry, some in _runs(lines, column):
        if not entry:
            parts.append(paragraph(some))
        elif any(len(re.split(r" {2,}", line.strip())) > 2 for line in some):
            parts.append(_fenced("text", some))
        else:
            parts.append(_defined(some, column))
    return "\n\n".join(parts)


def _runs(lines: list[str], column: int) -> list[tuple[bool, list[str]]]:
    """Lines that belong together: entries with what continues them, or prose."""
    runs: list[tuple[bool, list[str]]] = []
    for line in lines:
        entry = _entry(line, column) is not None or (line.startswith(" ") and bool(runs) and runs[-1][0])
        if runs and runs[-1][0] == entry:
            runs[-1][1].append(line)
        else:
            runs.append((entry, [line]))
    return runs


def _entry(line: str, column: int) -> tuple[str, str] | None:
    """A name and what it means; the longest name may have a single space after it."""
    if result := ENTRY.fullmatch(line):
        return None if line.startswith(" ") else (result[1], result[2])
    name, rest = line[: column - 1], line[column - 1 :]
    return (name, rest.strip()) if name.isidentifier() and rest.startswith(" ") and len(rest) > 1 else None


def _defined(lines: list[str], column: int) -> str:
    """A definition list."""
    entries: list[list[str]] = []
    for line in lines:
        if result := _entry(line, column):
            entries.append(list(result))
        else:
            entries[-1][1] += f" {line.strip()}"
    return "\n\n".join(f"{_names(name)}\n: {inline(text)}" for name, text in entries)


def _names(text: str) -> str:
    """Names of parameters as code."""
    return ", ".join(f"`{name}`" for name in text.split(", "))


def paragraph(lines: list[str]) -> str:
    """Prose; a sentence that begins a line although it had room on the line before begins a paragraph."""
    text, before = "", ""
    for line in lines:
        room = len(before) + len(line.split(" ")[0]) < WIDTH
        begins = before.endswith(".") and (room or line.startswith(SENTENCES))
        text += f"\n\n{line}" if begins else f"\n{line}"
        before = line
    return inline(text.strip("\n"))


def inline(text: str) -> str:
    """Prose without what Markdown would take for its own signs; code in backticks stays."""
    parts = text.split("`")
    for place in range(0, len(parts), 2):
        parts[place] = re.sub(r"(^[>#]|[\\*_<\[\]|])", r"\\\1", parts[place], flags=re.MULTILINE)
    return "`".join(parts)


def _fenced(kind: str, lines: list[str]) -> str:
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    return "\n".join((f"```{kind}", *(line[margin:] for line in lines), "```"))
