"""Sphinx's settings: python -m sphinx -W docs build/site/en, and for the Chinese pages

python -m sphinx -W -c docs -D language=zh_CN docs/zh build/site/zh

A link of a page leads to a file of the repository, as in any viewer of Markdown. One that leads to a page in the other
language leads to where that is built.
"""

import re
from pathlib import Path
from typing import Any

import clearhead

HERE = Path(__file__).parent
project = "clearhead"
author = "clearhead contributors"
copyright = "clearhead contributors; Apache License 2.0"  # noqa: A001
version = release = clearhead.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc"]
nb_execution_mode = "off"  # the notebooks hold their outputs, and a test runs them
exclude_patterns = ["zh", "lessons/exercises"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
smartquotes = False  # --json is no dash
suppress_warnings = ["misc.highlighting_failure"]
add_module_names = False
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "inherited-members": "Module,tuple,dict,str,BaseException,SpecialForm"}
html_theme = "furo"
html_title = "clearhead"

PAGE = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([\w./-]+)\.md(#[^()\s]*)?\)")
PICTURE = re.compile(r"!\[(.*)\]\((?:\.\./)?answer\.png\)")  # on the first page, in whose place the small model runs
LIVE = r'<iframe src="live.html" title="\1" style="border: 0; height: 48rem; width: 100%"></iframe>'
ENTRY = re.compile(r"\S.*? {2,}\S")  # a name, and what it means in a second column


def to_other_language(app: Any, name: str, source: list[str]) -> None:
    """Let links between the English and the Chinese pages lead to where the other ones are built."""
    here = Path(app.srcdir, name).parent
    language = "zh" if app.srcdir.name == "zh" else "en"

    def link(result: re.Match[str]) -> str:
        words, path, anchor = result.groups()
        target = Path(f"{(here / path).resolve()}.md")
        other = "zh" if target.is_relative_to(HERE / "zh") else "en"
        if not target.is_relative_to(HERE):  # no page of the site
            return f"{words} (`{target.relative_to(HERE.parent)}`)"
        if other == language:
            return result[0]
        home = HERE / "zh" if other == "zh" else HERE
        up = "../" * (name.count("/") + 1)
        return f'<a href="{up}{other}/{target.relative_to(home).with_suffix(".html")}{anchor or ""}">{words}</a>'

    source[0] = PAGE.sub(link, PICTURE.sub(LIVE, source[0]) if name == "index" else source[0])


def as_rst(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Turn a docstring, which is plain text, into what Sphinx reads: paragraphs, tables as they stand, examples."""
    made: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        if block.lstrip().startswith(">>>"):
            made += [*block.splitlines(), ""]
        elif block.startswith((" ", "├", "└")) or any(map(ENTRY.match, block.splitlines())) or "\n├" in block:
            made += [".. code-block:: text", "", *(f"   {line}" for line in block.splitlines()), ""]
        else:
            parts = block.split("`")
            parts[::2] = (re.sub(r"([\\*_|])", r"\\\1", part) for part in parts[::2])
            made += ["``".join(parts), ""]
    lines[:] = "\n".join(made).splitlines()


def live(app: Any, _error: Any) -> None:
    """Write the page that runs the shipped model, which the first page frames."""
    clearhead.explain("mary had a little").save(Path(app.outdir, "live.html"), language=app.config.language[:2])


def setup(app: Any) -> None:
    """Connect all, and bring the notebooks, which Sphinx finds below its own folder only."""
    (HERE / "notebooks").mkdir(exist_ok=True)
    for book in (HERE.parent / "examples").glob("*.ipynb"):
        (HERE / "notebooks" / book.name).write_bytes(book.read_bytes())
    app.connect("source-read", to_other_language)
    app.connect("build-finished", live)
    app.connect("autodoc-process-docstring", as_rst)
