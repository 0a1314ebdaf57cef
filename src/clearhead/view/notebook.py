"""What a notebook shows of an object: text anywhere, a picture without scripts, the page in a frame of its own.

No widget and no network: the frame is an `<iframe srcdoc>`, so neither its style nor its program touches the notebook.
"""

from collections.abc import Callable
from html import escape

MOST_CELLS = 64 * 64  # larger pictures are for the page
MOST_BYTES = 4 * 2**20  # an output is kept in the notebook's file


def bundle(text: str, page: Callable[[], str], picture: Callable[[], str], cells: int) -> dict[str, str]:
    """The MIME bundle: text, an SVG of so many cells where they are few, and the page where it is not too large."""
    found = {"text/plain": text}
    if 0 < cells <= MOST_CELLS:
        found["image/svg+xml"] = picture()
    whole = page()
    if len(whole) <= MOST_BYTES:
        found["text/html"] = framed(whole)
    else:
        size = len(whole) / 2**20
        found["text/html"] = f"<p>The page has {size:.0f} MB: <code>.save(&quot;page.html&quot;)</code> writes it.</p>"
    return found


def framed(page: str, height: int = 720) -> str:
    """A page in a frame that nothing outside it can reach."""
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" title="clearhead" srcdoc="{escape(page)}" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )
