"""The page's HTML: program, style and document in one file that makes no network requests."""

import os
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path

from clearhead.core.files import write_whole
from clearhead.core.rule_values import read_path
from clearhead.errors import FileError
from clearhead.view.container import Document, parts
from clearhead.words import say


def html(document: Document) -> str:
    """The whole page, with the program for the document's kind. Deterministic."""
    kind = document.header["kind"]
    program, style = _asset(f"{kind}.js"), _asset(f"{kind}.css")
    language = str(document.header.get("language", "en"))
    title = "".join(c if c.isprintable() else " " for c in str(document.header.get("title", "clearhead")))[:200]
    data = "\n".join(f'<script type="{kind}" id="{name}">{text}</script>' for name, kind, text in parts(document))
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
    """The Content-Security-Policy: this program and style only; no network, or only the page's own server."""
    kind = document.header["kind"]
    connect = "connect-src 'self'; " if document.header.get("served") else ""
    return (
        f"default-src 'none'; script-src '{_hash(_asset(f'{kind}.js'))}'; style-src '{_hash(_asset(f'{kind}.css'))}'; "
        f"{connect}base-uri 'none'; form-action 'none'"
    )


def encoded(document: Document) -> bytes:
    """The page as the bytes of a file."""
    return html(document).encode("utf-8", "xmlcharrefreplace")


def write(path: str | os.PathLike[str], document: Callable[[], Document]) -> None:
    """Write the page to a file, completely or not at all.

    Raises FileError when the name is not one of an HTML file, before any work, or when it cannot be written.
    """
    place = Path(read_path(path))
    if place.suffix.lower() not in ("", ".html", ".htm"):
        raise FileError(f"{place.name} is no name for a page, which is HTML.", f'save("{place.stem}.html")')
    write_whole(path, encoded(document()))


def _hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


@cache
def _asset(name: str) -> str:
    return (files("clearhead") / "view" / name).read_text(encoding="utf-8")
