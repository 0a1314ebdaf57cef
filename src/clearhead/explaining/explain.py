"""`ch.explain`: a text is run through a model, and one token's attention in one head is shown step by step.

Everything here is data, taken from the run; `report` prints it.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from clearhead.core.axes import Array, brief, group_size
from clearhead.core.problem import describe
from clearhead.core.rule_values import is_whole, whole_number
from clearhead.core.rules import FIELDS, Rules, take
from clearhead.errors import DtypeError, FileError, RuleError, SelectionError, shown
from clearhead.explaining.gpt2 import SHIPPED, ForwardPass, LayerRun, Model, Token
from clearhead.explaining.texts import check_unicode, find_token, parts_of
from clearhead.ops.matrix import AttentionMatrix
from clearhead.textbook.page import PageLayer, Scene, both, story
from clearhead.textbook.shapes import Sizes, Steps, layer_steps
from clearhead.textbook.trace import TokenTrace, Trace, listed, trace, used_rules
from clearhead.view import notebook, page, picture
from clearhead.view.container import Document, narrowed
from clearhead.words import Language

if TYPE_CHECKING:
    from clearhead.explaining.hub import HubModel

_MOST_WEIGHTS = 16 * 2**20  # bytes of W^Q … W^O that go into a page


class Window(NamedTuple):
    """The part of a longer text that was run: window `number`, from 1, tokens `first` to `stop` - 1, from 0."""

    number: int
    windows: int  # in all
    first: int
    stop: int
    tokens: int  # of the whole text


class Choice(NamedTuple):
    """A token that may come next, and its probability."""

    id: int
    text: str
    probability: float


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Explanation:
    """A text, the model's next tokens, and one head of one layer, step by step; made by `explain`."""

    model: "Model | HubModel"
    text: str
    tokens: list[Token]
    next: list[Choice]
    layer: int
    head: int
    chosen: tuple[bool, bool]  # whether layer and head were chosen here, by sharpness
    token: int
    run: LayerRun
    runs: list[LayerRun]  # every layer
    steps: Steps  # the steps of the whole layer, all heads, without numbers
    trace: Trace  # the chosen head, with its numbers
    row: TokenTrace  # the chosen token, computed alone
    entropy: Array  # (layers, heads): of the chosen token's row, in nats
    window: Window | None = None  # None: the whole text

    def __repr__(self) -> str:
        return brief(
            "Explanation", {"text": repr(self.text), "layer": self.layer, "head": self.head, "token": self.token}
        )

    def to_html(self, language: Language = "en") -> str:
        """A page that explains every step, as one self-contained HTML text. Raises RuleError for another language."""
        return page.html(document(self, language))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        names = parts_of(self.tokens, self.text).names
        masked = np.isneginf(self.trace.masked)
        name = f"layer {self.layer}, head {self.head}"
        said = f"{self.text}: {name}" + (f", next {self.next[0].text!r}" if self.next else "")
        draw = partial(picture.svg, self.trace.weights, masked, names, names, name=name)
        return notebook.bundle(said, [self.to_html], draw, masked.size)

    def save(self, path: str | os.PathLike[str], language: Language = "en") -> None:
        """Write that page to an .html file, whole or not at all. Raises FileError, RuleError for another language."""
        page.write(path, lambda: document(self, language))

    def to_json(self) -> dict[str, Any]:
        """All of it as plain numbers, lists and words; -∞ becomes None."""
        config = self.model.config
        part = {} if self.window is None else {"window": self.window._asdict()}
        return part | {
            "model": {"name": self.model.name, **config._asdict()},
            "text": self.text,
            "tokens": [token._asdict() for token in self.tokens],
            "next": [choice._asdict() for choice in self.next],
            "layer": self.layer,
            "head": self.head,
            "token": self.token,
            "entropy": listed(self.entropy),
            "layer_steps": [
                {"name": s.name, "symbol": s.symbol, "formula": s.formula, "axes": s.axes, "shape": s.shape}
                | {"multiply_adds": s.multiply_adds, "bytes": s.bytes}
                for s in self.steps
            ],
            "head_steps": {"x": listed(self.run.x), **{s.name: listed(s.array) for s in self.trace.steps}},
            "logsumexp": listed(self.trace.logsumexp),
            "layer_output": listed(self.run.output),
            "token_arithmetic": {
                "scores": listed(self.row.scores),
                "masked": listed(self.row.masked),
                "weights": listed(self.row.weights),
                "contributions": listed(self.row.contributions),
                "output": listed(self.row.output),
                "difference_from_the_matrix": self.row.difference,
            },
            "check": self.trace.check._asdict(),
        }


def document(seen: Explanation, language: Language = "en") -> Document:
    """The page's document: every head of every layer, and the projections' weights of the chosen layer."""
    config = seen.model.config
    chosen = {"layer": seen.layer, "head": seen.head, "query": seen.token}
    facts = {
        "model": both(
            "model", name=_called(seen.model), layers=config.layers, heads=config.heads, d_model=config.d_model
        ),
        "illustration": seen.model.name == SHIPPED,
        "text": seen.text,
        "next": [[choice.text, choice.probability] for choice in seen.next] or None,
        "entropy": listed(seen.entropy),
        "check": both("check", engine=seen.trace.check.engine, difference=seen.trace.check.largest_difference),
    }
    scene = Scene(seen.text, language, tokens=parts_of(seen.tokens, seen.text).names, chosen=chosen, facts=facts)
    return story([_page_layer(seen, number) for number in range(config.layers)], scene)


def _page_layer(seen: Explanation, number: int) -> PageLayer:
    run = seen.runs[number]
    given = describe(run.q, run.k, run.v, cast("Rules", run.rules))
    logsumexp = np.asarray(AttentionMatrix(run.q, run.k, **run.rules).logsumexp())
    assert given.v is not None
    arrays = {"x": run.x[None], "q": given.q, "k": given.k, "v": given.v, "logsumexp": logsumexp[None]}
    arrays["output"] = run.output[None]
    if number == seen.layer:
        arrays |= _projections(seen.model, number)
    return PageLayer(given.problem, seen.steps if number == seen.layer else _layer_steps(run), arrays, number)


def _projections(model: "Model | HubModel", number: int) -> dict[str, Array]:
    """W^Q … W^O and b^Q … b^O of one layer; none where they would make the page too large."""
    found = {name: narrowed(array) for name, array in model.projections(number).items()}
    return found if sum(array.nbytes for array in found.values()) <= _MOST_WEIGHTS else {}


def explain(
    text: str,
    model: "str | os.PathLike[str] | Model | HubModel | None" = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    token: int | str | None = None,
    count: int = 5,
    each: Callable[[range], Iterable[int]] = iter,
) -> Explanation:
    """Run `text` through a model and show one token's attention step by step: `clearhead explain` as an object.

    model         a directory in GPT-2 layout, a name that Transformers loads (extra `hf`), or a loaded model; None is
                  the small one that ships with clearhead, trained on nursery rhymes, for illustration
    layer, head   from 0; None takes the one whose row for the token has the least entropy
    token         a position (negative counts from the end) or a word of the text; None is the last
    count         how many next tokens to list
    each          iterates over the model's layers, such as a progress bar

    Returns an Explanation: tokens, next, steps (each intermediate's shape and formula), trace (the chosen head with its
    numbers in float64, (queries, keys) and (queries, d_v)), row (the chosen token alone), entropy (layers, heads) in
    nats; `save`, `to_html`, `to_json`. In a notebook it is shown as its page.
    Raises DtypeError for a text or model of another type, SelectionError for an unknown layer, head or token,
    ShapeError for an empty text or one that is too long, RuleError for a count that is not a whole number, FileError
    for a model that cannot be read, MissingExtraError where it needs Transformers. The forward pass takes
    O(tokens²·d_model + tokens·d_model²) for each layer; the chosen head's numbers take O(tokens²) memory.

    >>> import clearhead as ch
    >>> seen = ch.explain("humpty dumpty sat on")
    >>> seen.next[0].text, seen.trace.weights.shape
    (' a', (4, 4))
    """
    if not isinstance(text, str):
        raise DtypeError(f"text is {shown(text)}: expected a string.", 'explain("humpty dumpty sat on")')
    if not callable(each):
        raise RuleError(f"each is {shown(each)}: expected what walks the layers.", "each=tqdm")
    from clearhead.explaining.hub import find

    check_unicode("text", text)
    loaded, count = find(model), whole_number("count", count, 0)
    tokens = loaded.tokens(text)
    at = find_token(tokens, text, token)
    return _explained(loaded, (text, tokens, None), (layer, head, at), count, each)


def explain_windows(
    model: "Model | HubModel",
    text: str,
    *,
    layer: int | None = None,
    head: int | None = None,
    token: str | None = None,
    count: int = 5,
    each: Callable[[range], Iterable[int]] = iter,
) -> list[Explanation]:
    """`explain` for a text of any length, cut into windows of the model's positions; each is run alone.

    token     a position in the whole text or a word of it: only windows that hold it are explained; None explains the
              last token of each window
    Raises as `explain`.
    """
    found = windows(model, text)
    wanted = [_token_in(part, token) for part in found]
    if all(at is None for at in wanted):
        raise SelectionError(
            f"token {token!r} is neither a position 0..{found[0].window.tokens - 1} nor a word of the text."
        )
    pairs = zip(found, wanted, strict=True)
    return [_explained(model, part, (layer, head, at), count, each) for part, at in pairs if at is not None]


class TextWindow(NamedTuple):
    """A window of a text: its own text, its tokens with their positions in that, and which window it is."""

    text: str
    tokens: list[Token]
    window: Window


def windows(model: "Model | HubModel", text: str) -> list[TextWindow]:
    """A text cut into windows that do not overlap; special tokens, which each window has, are not counted."""
    cut = model.windows(text)
    sizes = [sum(token.stop > token.start for token in tokens) for tokens in cut]
    found, first = [], 0
    for number, (tokens, size) in enumerate(zip(cut, sizes, strict=True), start=1):
        start = min((token.start for token in tokens if token.stop > token.start), default=0)
        stop = max((token.stop for token in tokens), default=0)
        moved = [token._replace(start=max(0, token.start - start), stop=max(0, token.stop - start)) for token in tokens]
        found.append(TextWindow(text[start:stop], moved, Window(number, len(cut), first, first + size, sum(sizes))))
        first += size
    return found


def _token_in(part: TextWindow, token: str | None) -> int | None:
    """The index in a window of a token that is given for the whole text; None where the window does not hold it."""
    if token is None:
        return len(part.tokens) - 1
    own = [place for place, each in enumerate(part.tokens) if each.stop > each.start]
    with suppress(ValueError):
        number = int(token)
        if -part.window.tokens <= number < part.window.tokens:
            place = number % part.window.tokens - part.window.first
            return own[place] if 0 <= place < len(own) else None
    with suppress(SelectionError):
        return find_token(part.tokens, part.text, token)
    return None


def _explained(
    model: "Model | HubModel",
    part: "TextWindow | tuple[str, list[Token], None]",
    chosen: tuple[int | None, int | None, int],
    count: int,
    each: Callable[[range], Iterable[int]],
) -> Explanation:
    text, tokens, window = part
    layer, head, at = chosen
    _check_index("layer", layer, model.config.layers)
    _check_index("head", head, model.config.heads)
    run = forward_pass(model, tokens, each)
    entropy = np.stack([_row_entropy(part, at) for part in run.layers])
    picked_layer, picked_head = _sharpest(entropy, layer, head)
    ran = run.layers[picked_layer]
    shared = picked_head // group_size(len(ran.q), len(ran.k))
    q, k, v = ran.q[picked_head], ran.k[shared], ran.v[shared]
    steps = trace(q, k, v, **_of_head(ran.rules, picked_head))
    return Explanation(
        model=model,
        text=text,
        tokens=tokens,
        next=[] if run.logits is None else _next(model, run.logits[-1], count),
        layer=picked_layer,
        head=picked_head,
        chosen=(layer is None, head is None),
        token=at,
        run=ran,
        runs=run.layers,
        steps=_layer_steps(ran),
        trace=steps,
        row=steps.token(at),
        entropy=entropy,
        window=window,
    )


def _called(model: "Model | HubModel") -> str:
    """A model's name as a page shows it: of a directory only its last part."""
    place = Path(model.name)
    return place.resolve().name if place.is_dir() else model.name


def forward_pass(model: "Model | HubModel", tokens: list[Token], each: Callable[[range], Iterable[int]]) -> ForwardPass:
    """The forward pass. Raises FileError where it gives NaN or infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        run = model.run([t.id for t in tokens], each)
    for number, layer in enumerate(run.layers):
        if not all(np.isfinite(array).all() for array in (layer.x, layer.q, layer.k, layer.v, layer.output)):
            raise FileError(
                f"{model.name}: layer {number} gives NaN or infinity: its weights are damaged, or too large."
            )
    if run.logits is not None and not np.isfinite(run.logits).all():
        raise FileError(f"{model.name}: its logits are NaN or infinite: its weights are damaged, or too large.")
    return run


def _row_entropy(run: LayerRun, token: int) -> Array:
    seen = AttentionMatrix(run.q, run.k, **run.rules).observe(entropy=True, queries=slice(token, token + 1))
    return np.asarray(seen.entropy, dtype=np.float64)[:, 0]


def _of_head(rules: dict[str, Any], head: int) -> dict[str, Any]:
    """The rules of one head of the first text, without an axis for either: for 2-D arrays."""
    arrays = {name: np.asarray(x) for name, x in rules.items() if np.ndim(x) and FIELDS[name]}
    own_rules = take(arrays, {"batch": [0], "heads": [head]})
    lead = {name: sum(axis in ("batch", "heads") for axis in FIELDS[name]) for name in own_rules}
    return rules | {name: x.reshape(x.shape[lead[name] :]) for name, x in own_rules.items()}


def _sharpest(entropy: Array, layer: int | None, head: int | None) -> tuple[int, int]:
    allowed = np.full(entropy.shape, np.inf)
    rows = slice(None) if layer is None else layer
    cols = slice(None) if head is None else head
    allowed[rows, cols] = entropy[rows, cols]
    place = np.unravel_index(int(allowed.argmin()), entropy.shape)
    return int(place[0]), int(place[1])


def _next(model: "Model | HubModel", logits: Array, count: int) -> list[Choice]:
    exact = logits.astype(np.float64)
    probabilities = np.exp(exact - exact.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")[:count]
    return [Choice(int(i), model.text(int(i)), float(probabilities[i])) for i in order]


def _layer_steps(run: LayerRun) -> Steps:
    (n, width), (heads, _, d_k), (kv_heads, m, d_v) = run.x.shape, run.q.shape, run.v.shape
    sizes = Sizes((), heads, kv_heads, n, m, d_k, d_v)
    used = used_rules(cast("Rules", run.rules))._replace(through=run.through)
    out = (heads * d_v, run.output.shape[-1])
    own, said = (n, width), run.normalised
    return layer_steps(sizes, own, own, out, used, run.biases, "rows", run.x.itemsize, cross=False, normalised=said)


def _check_index(name: str, value: int | None, size: int) -> None:
    if value is None:
        return
    if not is_whole(value) or not 0 <= value < size:
        raise SelectionError(f"{name} {shown(value)} is outside 0..{size - 1}: the model has {size} {name}s.")
