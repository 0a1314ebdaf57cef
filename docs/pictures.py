"""Draw the README's picture from a real run: python docs/pictures.py writes it, --check compares."""

import argparse
import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from clearhead.explaining.explain import explain
from clearhead.explaining.steps import steps_of_text
from clearhead.models.model import load
from clearhead.report import answered, explained

PICTURE, TEXT = Path(__file__).parent / "explain.svg", "humpty dumpty sat on"
# Rounding errors differ from one processor to the next, and with them the width of their line.
ROUNDING = re.compile(r'textLength="[\d.]+"|(?<=deviation&#160;)[\d.e-]+|(?<=difference&#160;)[\d.e-]+')


def draw() -> str:
    """The run as SVG; the fonts that rich would fetch from the network are left to the reader's own."""
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    answered.show(console, explain(TEXT, load()), "en", whole=False, more=False, trust=None)
    console.print()
    explained.show(console, steps_of_text(TEXT, load()), "en")
    frame = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    frame = frame.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    title = f'clearhead explain "{TEXT}" --steps'
    return console.export_svg(title=title, theme=MONOKAI, code_format=frame, unique_id="explain")


def main() -> int:
    """Write the picture, or compare it with what a run draws now."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when it is not what a run draws now")
    svg = draw()
    if not parser.parse_args().check:
        PICTURE.write_text(svg, encoding="utf-8")
    elif ROUNDING.sub("", PICTURE.read_text(encoding="utf-8")) != ROUNDING.sub("", svg):
        print(f"not current: {PICTURE.name}; run python docs/pictures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
