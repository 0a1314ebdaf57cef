"""Copies the written pages to where Sphinx reads them, one folder for each language, and adds the generated ones.

A link in a page leads to a file of the repository, as it does in any viewer of Markdown. On the site it leads to the
page made of that file, in the same language or marked as English; any other file is copied and can be downloaded.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from frame import chinese, commands, errors, figures, gallery, reference, tables
from frame.outline import GROUPS, LANGUAGES, ordered

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
BESIDES = {  # pages that lie outside of docs
    "changelog": ROOT / "CHANGELOG.md",
    "contributing": ROOT / "CONTRIBUTING.md",
    "security": ROOT / "SECURITY.md",
}
HOMES = {ROOT / "README.md": ("en", "index"), ROOT / "README.zh-CN.md": ("zh", "index")}
CODE = re.compile(r"(^(```+).*?^\2$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
ATTRIBUTE = re.compile(r'\b(src|href)="([^"]+)"')
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
ENGLISH = "（英文）"
Place = tuple[str, str]  # a language and a page's name


def written() -> dict[Place, Path]:
    """Every written page and the file it is made of."""
    results: dict[Place, Path] = {}
    for path in sorted(DOCS.rglob("*.md")):
        name = path.relative_to(DOCS).with_suffix("").as_posix()
        if name.startswith("zh/"):
            results["zh", name.removeprefix("zh/")] = path
        elif not name.startswith("frame/"):
            results["en", name] = path
    return results | {("en", name): path for name, path in BESIDES.items() if path.exists()}


def stage(out: Path, pages_made: dict[str, str]) -> int:
    """Write every page below `out`, in a folder for each language; returns how many. ValueError says what is wrong.

    pages_made   the commands of the gallery's pages that are made
    """
    pages = written()
    names = reference.names()
    for (language, name), path in pages.items():
        text = led(path.read_text(encoding="utf-8"), path, (language, name), pages, out)
        if name.startswith("lessons/"):
            text = figures.embedded(text, language)
        text = gallery.embedded(text, language, pages_made)
        write(out / language / f"{name}.md", outside_code(text, str, lambda code: reference.linked(code, names)))
    english = {**reference.pages(names), **tables.pages(), **errors.pages()}
    generated = {"en": english | commands.pages("en"), "zh": chinese.pages(english) | commands.pages("zh")}
    for language, some in generated.items():
        for name, text in some.items():
            linked = reference.linked_text(text, names)
            write(out / language / f"{name}.md", outside_code(linked, str, lambda code: reference.linked(code, names)))
    for language in LANGUAGES:
        home(out / language, language)
        if any(name.startswith("lessons/") for _, name in pages):
            figures.write(out / "extra" / language / "lessons/_figures", language)
    return len(pages) + sum(map(len, generated.values()))


def led(text: str, source: Path, page: Place, pages: dict[Place, Path], out: Path) -> str:
    """The page with links that hold on the site."""
    of_file = {path: place for place, path in pages.items()} | HOMES
    language, name = page
    above = "../" * name.count("/")

    def link(result: re.Match[str]) -> str:
        picture, words, address = result.groups()
        path, mark, anchor = address.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return result[0]
        target = (source.parent / path).resolve()
        if not target.exists():
            raise ValueError(f"{source.relative_to(ROOT)}: [{words}]({address}) leads to no file")
        if target in of_file:
            other, to = of_file[target]
            if other == language:
                return f"[{words}]({above}{to}.md{mark}{anchor})"
            if (language, to) in pages and not anchor:
                return f"[{words}]({above}{to}.md)"
            note = ENGLISH if language == "zh" else ""
            return f'<a href="{above}../{other}/{to}.html{mark}{anchor}">{words}</a>{note}'
        if target.is_dir():
            inside = sorted(each for each in target.iterdir() if each.is_file())
            return f"{words} ({', '.join(copied(each) for each in inside)})" if inside else words
        if picture:
            kept = f"copies/{target.relative_to(ROOT).as_posix()}"
            copy(target, out / language / kept)
            return f"![{words}]({above}{kept})"
        return copied(target, words)

    def copied(target: Path, words: str = "") -> str:
        kept = f"copies/{target.relative_to(ROOT).as_posix()}"
        copy(target, out / "extra" / language / kept)
        return f'<a href="{above}{kept}">{words or target.name}</a>'

    def attribute(result: re.Match[str]) -> str:
        kind, address = result.groups()
        path, mark, anchor = address.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return result[0]
        target = (source.parent / path).resolve()
        if not target.exists():
            raise ValueError(f"{source.relative_to(ROOT)}: {result[0]} leads to no file")
        if not target.is_relative_to(DOCS):
            raise ValueError(f"{source.relative_to(ROOT)}: {result[0]} lies outside of docs")
        to = target.relative_to(DOCS)
        place = to.relative_to("zh") if to.parts[0] == "zh" else to
        other = "zh" if to.parts[0] == "zh" else "en"
        address = place.with_suffix(".html") if place.suffix == ".md" else place
        if place.suffix != ".md":
            copy(target, out / "extra" / other / place)
        here = Path(language) / Path(name).parent
        return f'{kind}="{os.path.relpath(Path(other) / address, here)}{mark}{anchor}"'

    return outside_code(text, lambda part: LINK.sub(link, ATTRIBUTE.sub(attribute, part)))


def outside_code(text: str, change: Callable[[str], str], code: Callable[[str], str] = str) -> str:
    """Change a text outside of its code; `code` changes what stands in single backticks."""
    parts = CODE.split(
        re.sub(r"\n+```$", "\n```", text, flags=re.MULTILINE)
    )  # text, code, the code's fence or None, text, …
    for place in range(0, len(parts), 3):
        parts[place] = change(parts[place])
        if place and not parts[place - 1]:
            parts[place - 2] = code(parts[place - 2])
    return "".join(part for place, part in enumerate(parts) if place % 3 != 2)


def home(folder: Path, language: str) -> None:
    """Add the list of all pages to the first one, where `<!-- pages of lessons -->` lists a group's titles as well.

    ValueError names a page in no group.
    """
    pages = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.md")} - {"index"}
    text = (folder / "index.md").read_text(encoding="utf-8")
    left = {page for page in pages if not page.startswith(("reference/", "copies/"))}
    for group in GROUPS:
        some = ordered(group, pages)
        left -= set(some)
        titles = "".join(f"- [{title(folder / f'{page}.md')}]({page}.md)\n" for page in some)
        text = text.replace(
            f"<!-- pages of {group.en.lower()} -->", f"## {getattr(group, language)}\n\n{titles}" * bool(some)
        )
        if some:
            lines = "\n".join(some)
            text += f"\n```{{toctree}}\n:hidden:\n:caption: {getattr(group, language)}\n\n{lines}\n```\n"
    if left:
        raise ValueError(f"{', '.join(sorted(left))}: in no group; add them in docs/frame/outline.py")
    write(folder / "index.md", text)


def title(path: Path) -> str:
    """A page's title."""
    result = TITLE.search(path.read_text(encoding="utf-8"))
    return result[1] if result else path.stem


def write(path: Path, text: str) -> None:
    """Write a text, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def copy(source: Path, target: Path) -> None:
    """Copy a file, and make the folders above it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
