"""Draw the README's pictures from real runs: python docs/pictures.py writes them, --check compares."""

import argparse
import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from clearhead.explaining.explain import explain
from clearhead.explaining.why import why
from clearhead.models.model import load
from clearhead.report import explained
from clearhead.report import why as answered

HERE = Path(__file__).parent
PICTURES = {"explain.svg": "humpty dumpty sat on"}
# Rounding errors differ from one processor to the next, and with them the width of their line.
ROUNDING = re.compile(r'textLength="[\d.]+"|(?<=deviation&#160;)[\d.e-]+|(?<=difference&#160;)[\d.e-]+')


def draw(name: str, text: str) -> str:
    """One run as SVG; the fonts that rich would fetch from the network are left to the reader's own."""
    console = Console(width=80, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    answered.show(console, why(text, load()), "en", whole=False, more=False, trust=None)
    console.print()
    explained.show(console, explain(text, load()), "en")
    frame = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    frame = frame.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    return console.export_svg(
        title=f'clearhead explain "{text}" --steps', theme=MONOKAI, code_format=frame, unique_id=name.split(".")[0]
    )


def main() -> int:
    """Write the pictures, or compare them with what a run draws now."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when a picture is not what a run draws now")
    check = parser.parse_args().check
    stale = []
    for name, text in PICTURES.items():
        svg = draw(name, text)
        if check:
            before = (HERE / name).read_text(encoding="utf-8") if (HERE / name).exists() else ""
            stale += [name] * (ROUNDING.sub("", before) != ROUNDING.sub("", svg))
        else:
            (HERE / name).write_text(svg, encoding="utf-8")
    if stale:
        print(f"not current: {', '.join(stale)}; run python docs/pictures.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
