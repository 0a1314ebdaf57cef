"""What `explain` needs of a model, whoever runs it: its tokens, and every layer's attention in one forward pass."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.rule_values import is_whole
from clearhead.core.state import State
from clearhead.errors import RuleError, expected

Each = Callable[[range], Iterable[int]]  # iterates over numbers, such as a progress bar
Slope = Callable[[Array], Array]  # of a number by the logits of some rows, (rows, vocabulary)
_NONE = np.empty((0, 0))


class Token(NamedTuple):
    """One token of a text: its id, its own text, where it stands in the text, and whether a chat's template put it."""

    id: int
    text: str
    start: int
    stop: int
    template: bool = False


def first_letter(token: Token, text: str) -> int:
    """Where a token's first character stands that is no space; a word's token may begin with the space before it."""
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
    through: str = "{}"  # what is applied to queries and keys after their projections, for the formulas
    normalised: bool = False  # is x the output of a layer norm?


@dataclass(frozen=True, eq=False, slots=True)
class ForwardPass:
    """The result of one text's pass through the model."""

    layers: Sequence[LayerRun]
    logits: Any  # (tokens, vocabulary), an array or computed by row; None where the model says no next token
    hidden: Sequence[Array] = ()  # (tokens, d_model): the residual stream before each layer and after the last
    ids: Sequence[int] = ()  # of the tokens
    past: Sequence[tuple[Array, Array]] = ()  # each layer's keys and values, where the decoder in NumPy ran
    from_row: Callable[[int, int], LayerRun] | None = None  # of a long text, a layer from some row on
    late: Callable[[int], Sequence[Array]] | None = None  # and the stream from a row on

    def attended(self, layer: int, row: int) -> tuple[LayerRun, int]:
        """A layer's attention in some row, and that row's place there; of a long text the rows before are left out."""
        return (self.layers[layer], row) if self.from_row is None else (self.from_row(layer, row), 0)

    def stream(self, row: int) -> Sequence[Array]:
        """The residual stream of the rows from `row` on, before each layer and after the last."""
        return [x[row:] for x in self.hidden] if self.late is None else self.late(row)


class Variant(NamedTuple):
    """What is other than in a run.

    gates    (tokens,) ln α of each key, or None
    first    the first row that can be other than in the run
    added    to heads' outputs from row `first` on: of each (layer, head), (rows, d_v)
    ids      tokens in place of the text's, or one behind them, by position, none before row `first`
    """

    gates: Array | None = None
    first: int = 0
    added: Mapping[tuple[int, int], Array] = {}
    ids: Mapping[int, int] = {}

    @property
    def layer(self) -> int:
        """The first layer that can give anything else than in the run."""
        return min((layer for layer, _ in self.added), default=0)


class Attended(NamedTuple):
    """Attention of the last tokens of a text: q (heads, rows, d_k), k and v (kv_heads, tokens, …).

    rules      of all edges; where there are gates, of the edges to earlier keys
    output     (heads, rows, d_v); state (heads, rows) each, both of all edges
    gates      (tokens,) ln α of each key, or None

    Of a derivative of a number, else empty:
    g          (heads, rows, d_v): by `output`, before W^O
    by_gates   (heads, tokens): by the gates' ln α; zeros without gates
    residual   (rows, d_model): by the residual stream before the layer; of layer 0 it is by the embeddings
    beside     (tokens,): of layer 0, by the gates' ln α through what mixes tokens beside attention in any layer
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
    """A loaded model: `model.Model` runs in NumPy, `hub.HubModel` in PyTorch; their methods say what they do.

    Its tokenizer is a `tokenizer.Tokenizer`, its config a NamedTuple with layers, heads, d_model, vocabulary, and
    whether a variant costs less than a run (`shares_runs`). Projections are W^Q … W^O and b^Q … b^O of one layer, none
    where queries and keys are not x·W + b.
    Each id that is generated is the likeliest after all before it; `each` iterates over layers or new tokens.
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
    """The ids of a text, or those that are given. Raises RuleError for anything else, or ids that the model lacks."""
    if isinstance(given, str):
        return [token.id for token in model.tokenizer.tokens(given)]
    most = model.config.vocabulary
    known = isinstance(given, (list, tuple, range, np.ndarray)) and len(given) > 0
    if not known or not all(is_whole(one) and 0 <= one < most for one in given):
        what = expected("ids", given, f"a text, or whole numbers from 0 to {most - 1}")
        raise RuleError(what, 'model.run("humpty dumpty sat on")')
    return [int(one) for one in given]


def ids_in(*values: Any) -> frozenset[int]:
    """The ids among these values, each of which may be one id, a list of them or nothing."""
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return frozenset(one for one in flat if is_whole(one) and one >= 0)


def layer_numbers(model: LanguageModel) -> Sequence[int]:
    """The number that each of the layers that attend has among all of the model's layers."""
    return getattr(model, "numbers", None) or range(model.config.layers)


def in_short(model: LanguageModel) -> str:
    """A model's repr."""
    config = model.config
    return f"Model({model.name}: {config.layers} layers, {config.heads} heads, d_model {config.d_model})"


def probabilities(logits: Array) -> Array:
    """softmax(logits) in float64."""
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
    """Some tokens with their probabilities among all next ones."""
    shares = probabilities(logits)
    return [Choice(i, model.tokenizer.text(i), float(shares[i]), float(logits[i])) for i in tokens]


def next_tokens(model: LanguageModel, logits: Array, count: int) -> list[Choice]:
    """The likeliest tokens, without sorting the whole vocabulary."""
    some = np.sort(np.argpartition(-logits, min(count, len(logits) - 1))[:count])
    return choices(model, logits, some[np.argsort(-logits[some], kind="stable")].tolist())
