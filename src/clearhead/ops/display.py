"""Display: how every object that holds attention matrices is shown; view/display.py makes pages and pictures of it."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from clearhead.core.rules import with_options
from clearhead.loading import load


class Page(TypedDict, total=False):
    """Options of a page; `Display.save` says what each is."""

    v: Any
    batch: int
    language: Literal["en", "zh"]
    title: str | None
    tokens: Sequence[str] | None
    source_tokens: Sequence[str] | None


class Display:
    """The display methods that AttentionMatrix shares with the result of `ch.watch`."""

    if TYPE_CHECKING:

        def __shown__(self, batch: int, v: Any = None) -> Any:
            """The layers of one batch item to show, with the caller's v, as a ShownRun; each subclass defines it."""

    @with_options
    def document(self, **options: Unpack[Page]) -> Any:
        """The content of the page that `save` writes: a header and arrays. Options and errors as `save`."""
        return load("view.display").document_of(self, options)

    @with_options
    def to_html(self, **options: Unpack[Page]) -> str:
        """The page that `save` writes, as one self-contained HTML text. Options and errors as `save`."""
        text: str = load("view.page").html(self.document(**options))
        return text

    @with_options
    def show(self, **options: Unpack[Page]) -> Any:
        """Show the page in a notebook's cell; the notebook's file then contains it. Options and errors as `save`."""
        return load("view.page").Framed(self.to_html(**options))

    @with_options
    def save(self, path: str | os.PathLike[str], **options: Unpack[Page]) -> None:
        """Write one self-contained page: every head as a square, any head as a map down to single weights.

        The page has at most 6 MB: the numbers of all heads if they fit, else those of the first heads (at least one) in
        bfloat16, and pictures of the others (`A.part(0, 5).save(path)` writes the page of another head).
        v         (…, kv_heads, keys, d_v), for a matrix only: the page then shows a weight's arithmetic up to the
                  output. A watched run has its own v
        batch, language ("en", "zh"), title
        tokens    (keys,) strings, the names of the tokens; with source_tokens (keys,), tokens is (queries,)
        Raises SelectionError for a batch item that does not exist; FileError when the file cannot be written or its
        name is no HTML file's; UnknownNameError for an unknown option; ShapeError for tokens of another length or v of
        another shape; RuleError for v where a run was watched.
        O(queries·keys·d_k) time for every head.
        """
        load("view.page").write(path, lambda: self.document(**options))

    def to_svg(
        self,
        head: int = 0,
        *,
        layer: int | str = 0,
        batch: int = 0,
        tokens: Sequence[str] | None = None,
        source_tokens: Sequence[str] | None = None,
    ) -> str:
        """Return one head's weights (queries, keys) as SVG text; above 64, a pixel shows the largest weight it covers.

        Raises SelectionError when there is no such layer, head or batch item, ShapeError for tokens of another length.
        """
        text: str = load("view.display").svg_of(self, head, layer, batch, tokens, source_tokens)
        return text

    def plot(
        self,
        head: int = 0,
        *,
        layer: int | str = 0,
        batch: int = 0,
        tokens: Sequence[str] | None = None,
        source_tokens: Sequence[str] | None = None,
        ax: Any = None,
    ) -> Any:
        """Draw one head's weights (queries, keys) on matplotlib's axes, and return them (extra `plot`).

        `ax` are the axes to draw on, None makes new ones; forbidden positions stay empty. Above 64 queries or keys,
        each pixel shows the largest weight it covers. `ax.figure.savefig("head.pdf")` writes the figure. Raises as
        `to_svg`, and MissingExtraError without matplotlib.

        >>> import clearhead as ch, numpy as np
        >>> ch.AttentionMatrix(np.eye(3), np.eye(3)).plot(tokens=["a", "b", "c"]).get_title()
        'A'
        """
        return load("view.display").plot_of(self, head, layer, batch, tokens, source_tokens, ax)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        bundle: dict[str, str] = load("view.display").bundle_of(self)
        return bundle
