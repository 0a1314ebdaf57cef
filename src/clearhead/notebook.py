"""What a notebook shows of an object: text anywhere, a picture without scripts, the page in a frame of its own.

No widget and no network: the frame is an `<iframe srcdoc>`, so neither its style nor its program touches the notebook.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from html import escape
from typing import Any

import numpy as np

from clearhead.axes import Array
from clearhead.picture import strips

MOST_CELLS = 64 * 64  # larger pictures are for the page
_STRIPS = 32  # heads whose statistics are drawn
_BY_TOKEN = ("logsumexp", "max_logit", "entropy", "distance", "received", "peak")
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


def observed(found: Mapping[str, Array]) -> dict[str, str]:
    """The MIME bundle of statistics, (…, heads, tokens) or more axes: a line for each, and strips of colour."""
    lines, drawn = [], {}
    for name, array in found.items():
        finite = array[np.isfinite(array)]
        reach = f"{finite.min():.4g} to {finite.max():.4g}" if finite.size else "nothing finite"
        lines.append(f"{name:<10} {array.shape!s:<24} {reach}")
        if name in _BY_TOKEN and finite.size:
            drawn[name] = np.where(np.isfinite(array), array, np.nan).reshape(-1, array.shape[-1])[:_STRIPS]
    text = "\n".join(lines) or "nothing was observed"
    if not drawn:
        return {"text/plain": text}
    picture = strips(drawn)
    return {"text/plain": text, "image/svg+xml": picture, "text/html": framed(picture, height=320)}


def shapes(seen: Any) -> str:
    """An observation on one line: how many queries and keys, and the shape and dtype of each of its arrays."""
    said = [f"queries={seen.queries}, keys={seen.keys}"]
    for name in (f.name for f in fields(seen) if f.name not in ("queries", "keys")):
        value = getattr(seen, name)
        arrays = value if isinstance(value, tuple) else () if value is None else (value,)
        if arrays:
            said.append(f"{name}: " + " and ".join(f"{tuple(np.shape(x))} {x.dtype}" for x in arrays))
    return f"Observation({', '.join(said)})"


def framed(page: str, height: int = 720) -> str:
    """A page in a frame that nothing outside it can reach."""
    return (
        f'<iframe sandbox="allow-scripts allow-downloads" title="clearhead" srcdoc="{escape(page)}" '
        f'style="width:100%;height:{height}px;border:0"></iframe>'
    )
