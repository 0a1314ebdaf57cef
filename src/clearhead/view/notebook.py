"""The notebook output of an object: text everywhere, a picture where scripts are off, else the page in a frame.

No widget and no network: the frame is an `<iframe srcdoc>`, so the page's style and program cannot affect the notebook.
"""

import os
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.statistics import PER_KEY, PER_QUERY, listed
from clearhead.digits import significant
from clearhead.tables import aligned
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.view.images import strips
from clearhead.words import Language, read_language

MOST_CELLS = 32 * 32  # the picture of a larger matrix has pixels
_STRIPS = 32  # heads whose statistics are drawn
_BY_TOKEN = (*listed(axes=PER_QUERY), *listed(axes=PER_KEY))
MOST_BYTES = 4 * 2**20  # outputs are saved in the notebook's file


def bundle(
    text: str, pages: Sequence[Callable[[], str]], svg: Callable[[], str], png: Callable[[], bytes], cells: int
) -> dict[str, str]:
    """The MIME bundle: text, an SVG of few cells or a PNG of more, and the first page that is not too large."""
    outputs = {"text/plain": text}
    if 0 < cells <= MOST_CELLS:
        outputs["image/svg+xml"] = svg()
    elif cells:
        outputs["image/png"] = b64encode(png()).decode()
    said = ""
    for written in pages:
        whole = written()
        if len(whole) <= MOST_BYTES:
            return outputs | {"text/html": said + framed(whole)}
        size = len(whole) / 2**20
        said = said or (
            f"<p>The page with every weight has {size:.0f} MB: <code>.save(&quot;page.html&quot;)</code> writes it.</p>"
        )
    return outputs | {"text/html": said}


def observed(statistics: Mapping[str, Array]) -> dict[str, str]:
    """The MIME bundle of statistics, (…, heads, tokens) or more axes: one line of text each, and strips of colour."""
    lines, drawn = [], {}
    for name, array in statistics.items():
        finite = array[np.isfinite(array)]
        ends = (significant(float(x), 4) for x in (finite.min(), finite.max())) if finite.size else ("nothing finite",)
        lines.append(aligned((10, 24, 0), (name, str(array.shape), " to ".join(ends)), " "))
        if name in _BY_TOKEN and finite.size:
            drawn[name] = np.where(np.isfinite(array), array, np.nan).reshape(-1, array.shape[-1])[:_STRIPS]
    text = "\n".join(lines) or "nothing was observed"
    if not drawn:
        return {"text/plain": text}
    picture = strips(drawn)
    tall = int(picture.partition(' height="')[2].partition('"')[0])
    return {"text/plain": text, "image/svg+xml": picture, "text/html": framed(picture, height=min(320, tall + 16))}


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


def framed(text: str, height: int = 720) -> str:
    """The page in a sandboxed frame, as HTML."""
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" title="clearhead" srcdoc="{escape(text)}" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )
