"""The notebook output of an object: text everywhere, a picture where scripts are off, else the page in a frame.

No widget and no network: the frame is an `<iframe srcdoc>`, so the page's style and program cannot affect the notebook.
"""

import os
from base64 import b64encode
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

from clearhead.view import page
from clearhead.view.container import Document
from clearhead.words import Language, read_language

MOST_CELLS = 32 * 32  # the picture of a larger matrix has pixels
MOST_BYTES = 4 * 2**20  # outputs are saved in the notebook's file


def bundle(text: str, whole: str, svg: Callable[[], str], png: Callable[[], bytes], cells: int) -> dict[str, str]:
    """The MIME bundle: text, an SVG of few cells or a PNG of more, and the page if it is not too large.

    whole     the page; "" where there is none
    """
    outputs = {"text/plain": text}
    if 0 < cells <= MOST_CELLS:
        outputs["image/svg+xml"] = svg()
    elif cells:
        outputs["image/png"] = b64encode(png()).decode()
    if not whole:
        return outputs
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
        """Return the page as one self-contained HTML text. Raises RuleError for another language."""
        return page.html(self._document(read_language(language)))

    def save(self, path: str | os.PathLike[str], language: Language = "en") -> None:
        """Write that page to an .html file, whole or not at all. Raises FileError, RuleError for another language."""
        page.write(path, lambda: self._document(read_language(language)))

    def show(self, language: Language = "en") -> "Framed":
        """Show the whole page in a notebook's cell, which keeps all of it. Raises RuleError for another language."""
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
    """The page in a sandboxed frame, as HTML."""
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" title="clearhead" srcdoc="{escape(text)}" '
        'style="width:100%;height:720px;border:0"></iframe>'
    )
