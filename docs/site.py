"""Build the site: python docs/site.py writes build/site, in English and in Chinese, to be read from disk.

Strict: a broken link or anchor, a reference to nothing, an error without an example, or a request to any network is an
error. Exit codes: 0 built, 1 something is wrong with a page, 2 a package is missing (pip install -e ".[docs]").
"""

import argparse
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from frame import checking, gallery, staging, texts
from frame.outline import LANGUAGES

ROOT = Path(__file__).parent.parent
NEEDED = ("sphinx", "myst_parser", "furo", "torch", "transformers")
SPHINX = {"en": "en", "zh": "zh_CN"}  # its own names of the languages


def step(words: str) -> None:
    """Say what is done now, and when."""
    print(f"{perf_counter() - _STARTED:5.1f} s  {words}", flush=True)


def build(staged: Path, out: Path, language: str) -> subprocess.Popen[str]:
    """Start Sphinx on one language's pages; a warning is an error."""
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-b", "html"]
    command += ["-c", str(ROOT / "docs/frame"), "-d", str(staged / ".doctrees" / language)]
    command += ["-D", f"language={SPHINX[language]}", str(staged / language), str(out / language)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")


def main() -> int:
    """Write every page, then check all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build/site", help="where to; default: build/site")
    parser.add_argument("--gallery", metavar="NAMES", help="its pages that are made, as in paris,cut; default: all")
    options = parser.parse_args()
    out = options.out.resolve()
    missing = [name for name in NEEDED if not find_spec(name)]
    if missing:
        print(f'{", ".join(missing)}: not installed. hint: pip install -e ".[docs]"', file=sys.stderr)
        return 2
    staged = out.with_name(f"{out.name}-pages")
    for folder in (out, staged):
        shutil.rmtree(folder, ignore_errors=True)
    known = gallery.commands()
    if options.gallery is not None:
        known = {name: command for name, command in known.items() if name in options.gallery.split(",")}
    made = gallery.start(known)
    step("pages: written, and generated from docstrings, parsers and tables; beside them those of the gallery")
    try:
        count = staging.stage(staged, known)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    step(f"Sphinx: {count} pages in {len(LANGUAGES)} languages")
    running = {language: build(staged, out, language) for language in LANGUAGES}
    said = [running[language].communicate()[1].replace(f"{staged}/", "") for language in LANGUAGES]
    if any(each.returncode for each in running.values()):
        print("".join(said), file=sys.stderr)
        return 1
    step("the gallery's pages")
    for language in LANGUAGES:
        gallery.place(made.result(), out / language / "_figures", language)
    step("the door that goes to the reader's language, and the text for machines")
    texts.write(staged / "en", out)
    step("links, anchors, and what a page loads")
    wrong = checking.check(out)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    step(f"{len(wrong)} mistakes" if wrong else f"built: {out / 'index.html'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    _STARTED = perf_counter()
    sys.exit(main())
