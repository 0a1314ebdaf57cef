"""Writes the page as HTML, with program, style and document in one file, without network requests; and for notebooks.

A notebook shows text, a picture of a small matrix if scripts are off, and else the page in a frame, without a widget or
the network. The frame is an `<iframe srcdoc>`, so the page's style and program cannot affect the notebook.
"""

import os
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.core.files import write_whole
from clearhead.core.rule_values import read_path
from clearhead.errors import FileError
from clearhead.view.container import Document, parts
from clearhead.words import Language, read_language, say

MOST_CELLS = 32 * 32  # the most cells of a picture in a notebook
MOST_BYTES = 4 * 2**20  # the most bytes of a page in a notebook, whose file keeps its outputs


def html(document: Document) -> str:
    """Write the whole page, with the program for the document's kind. Deterministic."""
    kind = document.header["kind"]
    program, style = _asset(f"{kind}.js"), _asset(f"{kind}.css")
    language = str(document.header.get("language", "en"))
    title = "".join(c if c.isprintable() else " " for c in str(document.header.get("title", "clearhead")))[:200]
    data = "\n".join(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in parts(document))
    return f"""<!doctype html>
<html lang="{"zh-Hans" if language == "zh" else "en"}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy(document)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<noscript>{say("zh" if language == "zh" else "en", "allow scripts")}</noscript>
{data}
<script>{program}</script>
</body>
</html>
"""


def policy(document: Document) -> str:
    """Write the Content-Security-Policy: only this program and style; no network, or only the page's own server."""
    kind, compiled = document.header["kind"], " 'wasm-unsafe-eval'" if "live" in document.header else ""
    connect = "connect-src 'self'; " if document.header.get("served") or "serve" in document.header else ""
    return (
        f"default-src 'none'; script-src '{_hash(_asset(f'{kind}.js'))}'{compiled}; "
        f"style-src '{_hash(_asset(f'{kind}.css'))}'; {connect}base-uri 'none'; form-action 'none'"
    )


def encoded(document: Document) -> bytes:
    """Write the page as the bytes of a file."""
    return html(document).encode("utf-8", "xmlcharrefreplace")


def write(path: str | os.PathLike[str], document: Callable[[], Document]) -> None:
    """Write the page to a file, whole or not at all.

    Raises FileError, before any work, if the name is not that of an HTML file, and if the file cannot be written.
    """
    check_name(path)
    write_whole(path, encoded(document()))


def check_name(path: str | os.PathLike[str]) -> None:
    """Raise FileError if the name is not that of an HTML file."""
    place = Path(read_path(path))
    if place.suffix.lower() not in ("", ".html", ".htm"):
        raise FileError(f"{place.name}: the name of a page must end in .html.", f"{place.stem}.html")


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


@cache
def _asset(name: str) -> str:
    return (files("clearhead") / "view" / name).read_text(encoding="utf-8")


def bundle(text: str, whole: str, svg: Callable[[], str], cells: int) -> dict[str, str]:
    """Make the MIME bundle: text, an SVG of a small matrix, and the whole page if it is not too large."""
    outputs = {"text/plain": text}
    if 0 < cells <= MOST_CELLS:
        outputs["image/svg+xml"] = svg()
    if len(whole) <= MOST_BYTES:
        return outputs | {"text/html": framed(whole)}
    said = f"The page has {len(whole) / 2**20:.0f} MB: <code>.save(&quot;page.html&quot;)</code> writes it."
    return outputs | {"text/html": f"<p>{said}</p>"}


class Framing:
    """An object with a page."""

    __slots__ = ()
    if TYPE_CHECKING:

        def _document(self, language: Language) -> Document: ...

    def to_html(self, language: Language = "en") -> str:
        """Return the page as self-contained HTML. Raises RuleError for an unknown language."""
        return html(self._document(read_language(language)))

    def save(self, path: str | os.PathLike[str], language: Language = "en") -> None:
        """Write the page to an .html file, whole or not at all. Raises FileError, RuleError for an unknown language."""
        write(path, lambda: self._document(read_language(language)))

    def show(self, language: Language = "en") -> "Framed":
        """Show the whole page in a notebook's cell, which saves all of it. Raises RuleError for an unknown language."""
        return Framed(self.to_html(language))


class Framed:
    """A page that a notebook shows in a frame; made by `show`."""

    def __init__(self, text: str) -> None:
        self.page = text

    def __repr__(self) -> str:
        return f"Framed({len(self.page) / 2**20:.1f} MB)"

    def _repr_html_(self) -> str:
        return framed(self.page)


def framed(text: str) -> str:
    """Write the page in a sandboxed frame, as HTML."""
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" title="clearhead" srcdoc="{escape(text)}" '
        'style="width:100%;height:720px;border:0"></iframe>'
    )
