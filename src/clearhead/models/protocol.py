"""Declares what `explain` needs of any model: its tokens, and every layer's attention in one forward pass."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.rule_values import is_whole
from clearhead.core.state import State
from clearhead.errors import RuleError, expected

Each = Callable[[range], Iterable[int]]  # wraps a loop over numbers, such as a progress bar
Slope = Callable[[Array], Array]  # from logits (rows, vocabulary) to a function's derivative by them
_NONE = np.empty((0, 0))


class Token(NamedTuple):
    """One token: its id, its own text, its span in the whole text, and whether a chat's template wrote it."""

    id: int
    text: str
    start: int
    stop: int
    template: bool = False


def first_letter(token: Token, text: str) -> int:
    """Return the place of a token's first character that is not a space; a word's token may begin with one."""
    inside = text[token.start : token.stop]
    return token.start + (len(inside) - len(inside.lstrip()) if inside.strip() else 0)


@dataclass(frozen=True, eq=False, slots=True)
class LayerRun:
    """The inputs and outputs of one layer's attention: x (tokens, d_model); q, k, v (heads, tokens, d_k).

    k and v may have fewer heads, each shared by a group of query heads.
    """

    x: Array
    q: Array
    k: Array
    v: Array
    heads: Array  # (heads, tokens, d_k)
    output: Array  # (tokens, d_model), after W^O
    rules: dict[str, Any]  # of the scores, as `clearhead.attention` takes them
    biases: frozenset[str] | None = frozenset(("b_q", "b_k", "b_v", "b_o"))  # None: projections have no known formula
    through: str = "{}"  # for the formulas: what is applied to projected queries and keys
    normalised: bool = False  # is x the output of a layer norm?


@dataclass(frozen=True, eq=False, slots=True)
class ForwardPass:
    """The result of one text's pass through the model."""

    layers: Sequence[LayerRun]
    logits: Any  # (tokens, vocabulary), an array or computed by row; None if the model predicts no next token
    hidden: Sequence[Array] = ()  # (tokens, d_model): the residual stream before each layer and after the last
    ids: Sequence[int] = ()  # of the tokens
    past: Sequence[tuple[Array, Array]] = ()  # each layer's keys and values, if the decoder in NumPy ran
    from_row: Callable[[int, int], LayerRun] | None = None  # for a long text: computes a layer from some row on
    late: Callable[[int], Sequence[Array]] | None = None  # for a long text: computes the stream from some row on

    def attended(self, layer: int, row: int) -> tuple[LayerRun, int]:
        """Return a layer's attention and the row's index in it; for a long text the rows before are left out."""
        return (self.layers[layer], row) if self.from_row is None else (self.from_row(layer, row), 0)

    def stream(self, row: int) -> Sequence[Array]:
        """Return the residual stream from `row` on, before each layer and after the last."""
        return [x[row:] for x in self.hidden] if self.late is None else self.late(row)


class Variant(NamedTuple):
    """How a changed run differs from its base run.

    gates    (tokens,) ln α of each key, or None
    first    the first row that can differ from the base run
    added    added to heads' outputs from row `first` on: (rows, d_v) for each (layer, head)
    ids      tokens that replace the text's, or one that follows it, by position, none before row `first`
    """

    gates: Array | None = None
    first: int = 0
    added: Mapping[tuple[int, int], Array] = {}
    ids: Mapping[int, int] = {}

    @property
    def layer(self) -> int:
        """The first layer that can differ from the base run."""
        return min((layer for layer, _ in self.added), default=0)


class Attended(NamedTuple):
    """Attention of the last tokens of a text: q (heads, rows, d_k), k and v (kv_heads, tokens, …).

    rules      the rules of all edges; with gates, of the edges to earlier keys
    output     (heads, rows, d_v), over all edges; so is state, (heads, rows) each
    gates      (tokens,) ln α of each key, or None

    Derivatives of a function of the logits, empty unless it was differentiated:
    g          (heads, rows, d_v): by `output`, before W^O
    by_gates   (heads, tokens): by the gates' ln α; zeros without gates
    residual   (rows, d_model): by the residual stream before the layer; in layer 0 by the embeddings
    beside     (tokens,): in layer 0, by the gates' ln α through modules other than attention that mix tokens
    """

    q: Array
    k: Array
    v: Array
    rules: dict[str, Any]
    output: Array
    state: State
    gates: Array | None = None
    g: Array = _NONE
    by_gates: Array = _NONE
    residual: Array = _NONE
    beside: Array = _NONE


class LanguageModel(Protocol):
    """A loaded model: `model.Model` runs in NumPy, `hub.HubModel` in PyTorch; their docstrings describe the methods.

    The tokenizer is a `tokenizer.Tokenizer`; the config is a NamedTuple with layers, heads, d_model, vocabulary, and
    whether a variant costs less than a run (`shares_runs`). Projections are W^Q … W^O and b^Q … b^O of one layer, or
    empty if queries and keys are not x·W + b.
    `generate` takes the likeliest token each time; `each` iterates over layers or new tokens.
    """

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    def projections(self, layer: int) -> dict[str, Array]: ...
    def generate(
        self, ids: list[int], count: int, each: Each = iter, *, ends: bool = False, run: ForwardPass | None = None
    ) -> list[int]: ...
    def run(self, ids: list[int] | str, each: Each = iter) -> ForwardPass: ...
    def differentiated(
        self,
        ids: list[int],
        variants: Sequence[Variant],
        rows: range,
        slope: Slope,
        run: ForwardPass | None = None,
        each: Each = iter,
    ) -> Iterator[tuple[int, int, Attended]]: ...
    def again(
        self, run: ForwardPass, variants: Sequence[Variant], rows: range, each: Each = iter
    ) -> Iterator[Array]: ...


def ids_of(model: LanguageModel, given: Sequence[int] | str) -> list[int]:
    """Return the ids of a text, or check given ids. Raises RuleError for anything else, or ids that the model lacks."""
    if isinstance(given, str):
        return [token.id for token in model.tokenizer.tokens(given)]
    most = model.config.vocabulary
    known = isinstance(given, (list, tuple, range, np.ndarray)) and len(given) > 0
    if not known or not all(is_whole(one) and 0 <= one < most for one in given):
        what = expected("ids", given, f"a text, or whole numbers from 0 to {most - 1}")
        raise RuleError(what, 'model.run("humpty dumpty sat on")')
    return [int(one) for one in given]


def ids_in(*values: Any) -> frozenset[int]:
    """Collect the ids among these values; a value may be an id, a list of ids or None."""
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return frozenset(one for one in flat if is_whole(one) and one >= 0)


def layer_numbers(model: LanguageModel) -> Sequence[int]:
    """Return the numbers, among all layers of the model, of the layers that attend."""
    return getattr(model, "numbers", None) or range(model.config.layers)


def in_short(model: LanguageModel) -> str:
    """Return a model's repr."""
    config = model.config
    return f"Model({model.name}: {config.layers} layers, {config.heads} heads, d_model {config.d_model})"


def probabilities(logits: Array) -> Array:
    """Return softmax(logits) in float64."""
    exact = logits.astype(np.float64)
    shares = np.exp(exact - exact.max())
    return np.asarray(shares / shares.sum())


class Choice(NamedTuple):
    """A token that may come next, its probability and its logit."""

    id: int
    text: str
    probability: float
    logit: float


def choices(model: LanguageModel, logits: Array, tokens: Sequence[int]) -> list[Choice]:
    """Return some tokens with their probabilities and logits as next tokens."""
    shares = probabilities(logits)
    return [Choice(i, model.tokenizer.text(i), float(shares[i]), float(logits[i])) for i in tokens]


def next_tokens(model: LanguageModel, logits: Array, count: int) -> list[Choice]:
    """Return the likeliest tokens, the likeliest first, without sorting the whole vocabulary."""
    some = np.sort(np.argpartition(-logits, min(count, len(logits) - 1))[:count])
    return choices(model, logits, some[np.argsort(-logits[some], kind="stable")].tolist())
