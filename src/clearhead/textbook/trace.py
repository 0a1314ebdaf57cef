"""`ch.trace`: every intermediate of attention with its name and cost, and the output compared with the fast engine's.

`trace_layer` does the same for a whole layer, from X to U.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack, cast

import numpy as np

from clearhead import engines
from clearhead.core import definition
from clearhead.core.arrays import as_array, near
from clearhead.core.axes import Array, brief, join_heads, split_heads
from clearhead.core.call import Call, describe, describe_whole
from clearhead.core.problem import Problem
from clearhead.core.rule_values import read_members, read_place, whole_number
from clearhead.core.rules import Rules, check_names, with_options
from clearhead.core.statistics import Wanted
from clearhead.digits import fixed, significant
from clearhead.textbook.computed import largest_difference, read_layer
from clearhead.textbook.page import PageLayer, both, story
from clearhead.textbook.shapes import Convention, Sizes, Steps, attention_steps, check_convention, layer_steps, turned
from clearhead.view import images, page
from clearhead.view.container import Document
from clearhead.view.names import Names, check_count, token_names
from clearhead.words import Language

_NAMES = ("scores", "scaled", "capped", "biased", "masked", "logsumexp", "weights", "output")
_INPUTS = ("x", "context", "w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o")


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class TokenTrace:
    """One query's attention, computed from q_i alone: q_i·k_j for each key, softmax, the weighted sum of values."""

    query: int
    scores: Any  # (…, heads, keys): ‖q_i‖·‖k_j‖·cos θ
    masked: Any  # (…, heads, keys)
    weights: Any  # (…, heads, keys)
    contributions: Any  # (…, heads, keys, d_v): a_ij·v_j
    output: Any  # (…, heads, d_v)
    difference: float  # the largest difference from row i of the whole matrix and its output
    norm: Any  # (…, heads): ‖q_i‖
    key_norms: Any  # (…, heads, keys): ‖k_j‖
    cosine: Any  # (…, heads, keys): cos θ, 0 where a norm is 0

    def __repr__(self) -> str:
        return brief("TokenTrace", {"query": self.query, "weights": self.weights, "output": self.output})

    def written_out(self, head: int = 0, count: int = 8, *, tokens: Any = None) -> str:
        """One head's weighted sum as text, its `count` largest weights first: 0.92·v_1 + 0.08·v_0 = [0.92 2.16].

        tokens   (keys,) strings to write instead of the keys' numbers: 0.92·v_sat
        Raises SelectionError for an unknown head or tokens that are no strings, RuleError where `count` is not a whole
        number from 0 up, ShapeError for tokens of another number.
        """
        rows, outputs = (x.reshape(-1, x.shape[-1]) for x in map(np.asarray, (self.weights, self.output)))
        head, count = read_place("head", head, len(rows)), whole_number("count", count, 0)
        weights, output = rows[head], outputs[head]
        strongest = [j for j in np.argsort(-weights, kind="stable") if weights[j] > 0]
        names = [str(j) for j in range(len(weights))]
        if tokens is not None:
            names = read_members("tokens", tokens, (str,), "a list of strings", "tokens=['the', ' cat', ' sat']")
            check_count("tokens", names, len(weights), "keys")
        terms = [f"{fixed(float(weights[j]), 4, 8)}·v_{names[j].strip()}" for j in strongest[:count]]
        if len(strongest) > count:
            rest = float(weights[strongest[count:]].sum())
            terms.append(f"({len(strongest) - count} more, {fixed(rest, 4, 8)} together)")
        shown = " ".join(fixed(float(x), 4, 8) for x in output[:8])
        return f"{' + '.join(terms) or '0'} = [{shown}{' …' if len(output) > 8 else ''}]"


class Trace:
    """Every intermediate of one attention, in float64, as attributes and as an ordered list of `steps`.

    scores, scaled, capped, biased, masked and weights (…, heads, queries, keys) are always there, each equal to the one
    before where its rule is not used; logsumexp is (…, heads, queries), output (…, heads, queries, d_v). `steps` lists
    those that change something, with symbol, formula, axes, shape and cost; `difference` is the largest between this
    output, computed in float64, and that of the fast engine, `engine`. In columns convention the last two axes of every
    array are swapped.

    >>> import numpy as np, clearhead as ch
    >>> t = ch.trace(np.eye(2), np.eye(2), np.eye(2), causal=True)
    >>> [step.symbol for step in t.steps], t.weights[0].tolist(), t.token(0).written_out()
    (['Q', 'K', 'V', 'S', "S'", 'M', 'A', 'O'], [1.0, 0.0], '1.0000·v_0 = [1.0000 0]')
    """

    q: Any
    k: Any
    v: Any
    scores: Any
    scaled: Any
    capped: Any
    biased: Any
    masked: Any
    logsumexp: Any
    weights: Any
    output: Any

    def __init__(
        self, call: Call, book: definition.Matrix, steps: Steps, arrays: dict[str, Array], convention: Convention
    ) -> None:
        """Keep what the definition computed: arrays by the names of steps, tokens as rows, with the caller's axes."""
        self.convention: Convention = convention
        self.problem: Problem = call.problem
        self._call, self._book, self._arrays = call, book, arrays
        shown = {n: x if n == "logsumexp" else turned(x, convention) for n, x in arrays.items()}
        self.steps = Steps(replace(step, array=call.restore(shown[step.name])) for step in steps)
        for name, array in shown.items():
            setattr(self, name, call.restore(array))
        self.engine = engines.choose(self.problem).engine
        output = engines.get(self.engine).rows(call, Wanted(output=True))["output"].astype(np.float64)
        self.difference = largest_difference(output, book.output)

    def __str__(self) -> str:
        return f"{self.steps}\nlargest difference from the {self.engine} engine: {significant(self.difference, 2)}"

    def __repr__(self) -> str:
        return f"Trace({', '.join(step.name for step in self.steps)})"

    def to_html(self, language: Language = "en", *, tokens: Any = None, source_tokens: Any = None) -> str:
        """A page that explains every step, as one self-contained HTML text; arguments and errors as in `save`."""
        return page.html(self._page(language, tokens, source_tokens))

    def save(
        self, path: str | os.PathLike[str], language: Language = "en", *, tokens: Any = None, source_tokens: Any = None
    ) -> None:
        """Write a page that explains every step to an .html file, whole or not at all.

        language       "en" or "zh"
        tokens         (keys,) strings: the tokens; with source_tokens, (queries,) strings
        source_tokens  (keys,) strings: the other text of cross-attention
        Raises FileError when it cannot be written, ShapeError for a list of another length, RuleError for another
        language.
        """
        page.write(path, lambda: self._page(language, tokens, source_tokens))

    def _page(self, language: Language, tokens: Any, source_tokens: Any) -> Document:
        return self.document(language, *token_names(tokens, source_tokens, self.problem))

    def document(
        self,
        language: Language = "en",
        tokens: Names = None,
        sources: Names = None,
        claims: Sequence[Mapping[str, Any]] = (),
    ) -> Document:
        """The document of the page that explains this trace.

        tokens, sources   as `token_names` gives them
        claims            verdicts on what a file claims
        """
        facts = {"check": both("check", engine=self.engine, difference=self.difference)}
        told = {"convention": self.convention, "tokens": tokens, "sources": sources, "facts": facts, "claims": claims}
        return story([self.layer()], "attention, step by step", language, told)

    def layer(self, number: int | None = None) -> PageLayer:
        """One layer of a page's story: the inputs, tokens as rows, and the rules."""
        call, computed = self._call, self._arrays
        assert call.v is not None
        arrays = {"q": call.q, "k": call.k, "v": call.v, "logsumexp": self._book.logsumexp}
        arrays |= {name: computed[name] for name in _INPUTS if name in computed}
        if arrays.get("context") is arrays.get("x"):
            arrays.pop("context", None)
        for name in {"x", "context"} & set(arrays):
            arrays[name] = arrays[name].reshape(-1, *arrays[name].shape[-2:])
        return PageLayer(self.problem, self.steps, arrays, number)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        book = self._book
        weights, hidden = book.weights[:1, :1], book.hidden()[:1, :1]  # of the first head, where there is one
        svg = lambda: images.svg(weights[0, 0], hidden[0, 0], name="A")  # noqa: E731
        return page.bundle(str(self), self.to_html(), svg, weights.size)

    @np.errstate(invalid="ignore", over="ignore")
    def token(self, query: int) -> TokenTrace:
        """One query's attention, computed from q_i alone: it equals row i of the matrices, but for `difference`.

        Raises SelectionError for an unknown query. O(heads·keys·(d_k + d_v)).
        """
        problem, call, whole = self.problem, self._call, self._book
        i = read_place("query", query, problem.queries)
        assert call.v is not None
        book = definition.attend(problem.take(queries=range(i, i + 1)), call.q[:, :, i : i + 1], call.k, call.v)
        values = definition.over_heads(call.v.astype(np.float64), problem.heads).swapaxes(-1, -2)
        rows = {name: getattr(book, name)[:, :, 0] for name in ("scores", "masked", "weights", "output")}
        difference = max(largest_difference(rows[n], getattr(whole, n)[:, :, i]) for n in ("weights", "output"))
        rows["contributions"] = definition.contributions(book, values).swapaxes(-1, -2)
        norm, lengths = (np.linalg.norm(x.astype(np.float64), axis=-1) for x in (call.q[:, :, i], call.k))
        each = np.repeat(lengths, problem.group, axis=1)
        product = norm[..., None] * each
        cosine = np.divide(rows["scores"], product, out=np.zeros_like(product), where=product != 0)
        rows |= {"norm": norm, "key_norms": each, "cosine": cosine}
        return TokenTrace(i, difference=difference, **call.give_all(rows))


@with_options
def trace(q: Any, k: Any, v: Any, *, convention: Convention = "rows", **rules: Unpack[Rules]) -> Trace:
    """Attention step by step, every intermediate kept in float64: S = Q·Kᵀ, S/√d_k, …, A = softmax, O = A·V.

    q           (…, heads, queries, d_k), or (queries, d_k) for one head; any float dtype
    k           (…, kv_heads, keys, d_k)
    v           (…, kv_heads, keys, d_v)
    convention  "rows" for tokens as rows; "columns" for tokens as columns: (…, d_k, queries) and so on
    rules       as in `attention`

    Three axes are (heads, tokens, width): for a batch of texts with one head give q[:, None], and for x (batch, tokens,
    d_model) with its projections there is `trace_layer`.
    Returns a Trace of the kind of array that was given, in float64; its `difference` is the largest one from the fast
    engine on the same inputs.
    Raises what `attention` raises, and RuleError for another convention. O(queries·keys·(d_k + d_v)) time and
    O(queries·keys) memory for each head: meant for short inputs.
    Source: Vaswani et al. 2017, section 3.2.1.

    >>> import numpy as np, clearhead as ch
    >>> t = ch.trace(np.array([[1, 3], [2, 0.5]]), np.array([[0.5, 2], [1, 3]]), np.array([[0.0, 4], [1, 2]]))
    >>> t.scores.tolist(), t.output.round(4).tolist()
    ([[6.5, 10.0], [2.0, 3.5]], [[0.9224, 2.1553], [0.7428, 2.5144]])
    """
    check_convention(convention)
    q, k, v = map(near, (q, k, v))
    rules = cast("Rules", {name: near(x) for name, x in rules.items()})
    if convention == "columns":
        read = [as_array(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
        q, k, v = (restore(turned(array, convention)) for array, restore in read)
    call = describe_whole(q, k, v, rules)
    book = definition.attend(call.problem, call.q, call.k, call.v)
    raw = {name: as_array(x, name)[0] for name, x in (("q", q), ("k", k), ("v", v))}
    sizes = Sizes.of((x.shape for x in raw.values()), convention, call.problem.dtype.itemsize)
    return Trace(call, book, attention_steps(sizes, rules), raw | _named(call.problem, book), convention)


@with_options
def trace_layer(
    x: Any,
    w_q: Any,
    w_k: Any,
    w_v: Any,
    w_o: Any = None,
    *,
    num_heads: int = 1,
    context: Any = None,
    b_q: Any = None,
    b_k: Any = None,
    b_v: Any = None,
    b_o: Any = None,
    convention: Convention = "rows",
    **rules: Unpack[Rules],
) -> Trace:
    """A whole attention layer step by step, from X to U: projections, heads, attention, joining, output projection.

    x           (…, queries, d_model), tokens as rows (X·W), or (…, d_model, queries) with convention="columns" (W·X)
    w_q, w_k    (d_model, heads·d_k), (d_model, kv_heads·d_k); in columns convention their transposes
    w_v         (d_model, kv_heads·d_v)
    w_o         (heads·d_v, d_out), or None: the concatenated heads are the output
    num_heads   query heads; the number of key heads follows from w_k's width
    context     (…, keys, d_context) for cross-attention; None is self-attention
    b_q … b_o   biases, one number per output column

    Inputs are numbers of any dtype and are computed with in float64; rules are as in `attention`, and keep their axes
    (queries, keys) in columns convention.
    Returns a Trace with x, q, k, v (…, heads, tokens, width), the intermediates of `trace` per head, `heads`
    (…, heads, queries, d_v), `concat` (…, queries, heads·d_v) and `output`, which is U (…, queries, d_out).
    Raises what `trace` raises; ShapeError and DtypeError name the matrix that does not fit, RuleError a num_heads that
    is not a whole number or a b_o without w_o. O(queries·d_model²) time for the projections, besides that of `trace`.
    Source: Vaswani et al. 2017, section 3.2.2.

    >>> import numpy as np, clearhead as ch
    >>> w = np.eye(4)
    >>> ch.trace_layer(np.eye(3, 4), w, w, w, num_heads=2).output.shape
    (3, 4)
    """
    inputs = {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, "w_o": w_o, "context": context}
    inputs |= {"b_q": b_q, "b_k": b_k, "b_v": b_v, "b_o": b_o}
    inputs = {name: near(x) for name, x in inputs.items()}
    rules = cast("Rules", {name: near(x) for name, x in rules.items()})
    check_names(rules)
    layer, sizes = read_layer(inputs, num_heads, convention)
    q = split_heads(layer.projected(layer.x, "q"), num_heads)
    k, v = (split_heads(layer.projected(layer.context, part), sizes.kv_heads or 1) for part in "kv")
    call = describe(q, k, v, rules).giving_back(as_array(near(x), "x")[1])
    book = definition.attend(call.problem, call.q, call.k, call.v)
    arrays = {"x": layer.x, "context": layer.context, "q": q, "k": k, "v": v, **_named(call.problem, book)}
    arrays |= {f"w_{part}": w for part, w in layer.w.items()} | {f"b_{part}": b for part, b in layer.b.items()}
    arrays |= {"heads": arrays["output"], "concat": join_heads(arrays["output"])}
    arrays["output"] = arrays["concat"] if layer.out is None else layer.projected(arrays["concat"], "o")
    out = None if layer.out is None else layer.out[-1]
    widths = layer.x.shape[-1], None if context is None else layer.context.shape[-1], out
    steps = layer_steps(sizes._replace(itemsize=layer.x.itemsize), *widths, rules, [f"b_{part}" for part in layer.b])
    return Trace(call, book, steps, arrays, convention)


def _named(problem: Problem, book: definition.Matrix) -> dict[str, Array]:
    """The definition's intermediate results by name, with the axes of the caller's inputs."""
    return {name: problem.restore(getattr(book, name)) for name in _NAMES}
