"""The figures of the lessons: pages that clearhead's commands write, and how the site shows them within a lesson.

`python docs/lessons/figures.py FOLDER` writes FOLDER/en/NAME.html and FOLDER/zh/NAME.html. In a lesson's text a figure
is a comment, <!-- figure: NAME -->, above its picture. Where a page cannot stand within a text, as on GitHub, one sees
the picture.
"""

import contextlib
import html
import io
import re
import sys
from pathlib import Path
from typing import NamedTuple

from clearhead.cli import main as clearhead

HERE = Path(__file__).parent
FIGURE = re.compile(r"<!-- figure: ([\w-]+) -->\n!\[([^\]]*)\]\([^)]*\)")
OPEN = {"en": "The figure on a page of its own", "zh": "在单独的页面中打开此图"}


class Figure(NamedTuple):
    """A command without --html, the place in its page's address that a lesson opens, and its height there in pixels."""

    command: tuple[str, ...]
    place: str = ""
    height: int = 640


FIGURES = {
    "scale": Figure(("scale",)),
    "one-head": Figure(("trace", str(HERE / "exercises/one-head.json")), "#step-scores"),
    "cross": Figure(("trace", str(HERE / "exercises/2-cross.json")), "#step-scores"),
    "humpty": Figure(("explain", "humpty dumpty sat on", "--layer", "0", "--head", "7"), height=800),
    "heads": Figure(("explain", "humpty dumpty sat on a", "--layer", "0", "--head", "7"), height=800),
    "generate": Figure(("explain", "humpty dumpty", "--generate", "6", "--token", "7"), height=800),
    "learn": Figure(("learn",), height=800),
    "why": Figure(("explain", "mary had a little", "--why"), "#at=0.0.2&cell=3.0&show=most.sqrt.0.0.cuts", 800),
}


def figures(folder: Path, language: str) -> None:
    """Write NAME.html of every figure into a folder, in one language ("en" or "zh"). RuntimeError names what failed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in FIGURES.items():
        write(figure, folder / f"{name}.html", language)


def write(figure: Figure, path: Path, language: str) -> None:
    """Write one figure's page. RuntimeError says which command failed."""
    command = [*figure.command, "--html", str(path), "--lang", language]
    with contextlib.redirect_stdout(io.StringIO()):
        code = clearhead(command)
    if code:
        raise RuntimeError(f"clearhead {' '.join(command)} ended with exit code {code}.")


def embedded(text: str, language: str, folder: str = "_figures") -> str:
    """A lesson's text with each figure in the place of its picture; the pages lie in `folder` beside the lesson's.

    KeyError for a figure that is not in `FIGURES`.
    """

    def frame(result: re.Match[str]) -> str:
        figure = FIGURES[result[1]]
        source, title = html.escape(f"{folder}/{result[1]}.html{figure.place}"), html.escape(result[2])
        style = f"width:100%;height:{figure.height}px;border:1px solid #8886"
        return (
            f'<iframe src="{source}" title="{title}" loading="lazy" style="{style}"></iframe>\n'
            f'<p><a href="{source}">{OPEN[language]}</a></p>'
        )

    return FIGURE.sub(frame, text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for each in OPEN:
        figures(Path(sys.argv[1]) / each, each)
