"""`ch.trace`: every intermediate of attention, with its name and cost, compared with the fast engine's output."""

import os
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import numpy as np

from clearhead import engines
from clearhead.core import definition
from clearhead.core.arrays import as_array
from clearhead.core.axes import Array, brief
from clearhead.core.call import Call, describe_whole
from clearhead.core.problem import Problem
from clearhead.core.rule_values import has_axes, read_members, read_place, whole_number
from clearhead.core.rules import Rules
from clearhead.core.statistics import Wanted
from clearhead.digits import fixed, significant
from clearhead.errors import RuleError
from clearhead.textbook.page import PageLayer, Scene, both, story
from clearhead.textbook.shapes import Convention, Sizes, Steps, Used, attention_steps, check_convention, turned
from clearhead.view import images, notebook, page
from clearhead.view.container import Document
from clearhead.view.names import check_count, token_names
from clearhead.words import Language, read_language, say

_INPUTS = ("x", "context", "w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o")


class Check(NamedTuple):
    """The largest difference between this output, computed in float64, and a fast engine's on the same inputs."""

    engine: str
    largest_difference: float


class Geometry(NamedTuple):
    """S_ij = ‖q_i‖·‖k_j‖·cos θ_ij: the norms and the cosine of every query with every key."""

    query_norms: Any  # (…, heads, queries)
    key_norms: Any  # (…, kv_heads, keys)
    cosine: Any  # (…, heads, queries, keys), 0 where a norm is 0

    def __repr__(self) -> str:
        return brief("Geometry", self._asdict())


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class TokenTrace:
    """One query's attention, computed from q_i alone: q_i·k_j for each key, softmax, the weighted sum of values."""

    query: int
    scores: Any  # (…, heads, keys); None where the weights were given
    masked: Any  # (…, heads, keys); likewise
    weights: Any  # (…, heads, keys)
    contributions: Any  # (…, heads, keys, d_v): a_ij·v_j
    output: Any  # (…, heads, d_v)
    difference: float  # the largest difference from row i of the whole matrix and its output

    def __repr__(self) -> str:
        return brief("TokenTrace", {"query": self.query, "weights": self.weights, "output": self.output})

    def written_out(self, head: int = 0, count: int = 8, *, tokens: Any = None) -> str:
        """One head's weighted sum as text, its `count` largest weights first: 0.92·v_1 + 0.08·v_0 = [0.92 2.16].

        tokens   (keys,) strings, written in the place of the keys' numbers: 0.92·v_sat
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
    those that change something, with symbol, formula, axes, shape and cost; `check` compares the output with the fast
    engine's. In columns convention the last two axes of every array are swapped.

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
    _row_sums: Any = 1.0  # what each query's weights sum to, as they broadcast to the output

    def __init__(
        self,
        described: Call,
        book: definition.Textbook,
        steps: Steps,
        arrays: dict[str, Array],
        convention: Convention,
    ) -> None:
        self.convention: Convention = convention
        self.problem: Problem = described.problem
        self._described, self._book = described, book
        self._inputs = {name: arrays[name] for name in _INPUTS if name in arrays}
        if self._inputs.get("context") is self._inputs.get("x"):
            self._inputs.pop("context", None)
        self.steps = Steps(replace(s, array=described.restore(turned(arrays[s.name], convention))) for s in steps)
        for name, array in arrays.items():
            setattr(self, name, described.restore(array if name == "logsumexp" else turned(array, convention)))
        self.check = self._checked()

    @np.errstate(invalid="ignore", over="ignore")
    def _checked(self) -> Check:
        """The output beside that of the engine that `attention` takes."""
        assert self._book.output is not None
        name = engines.choose(self.problem).engine
        output = engines.get(name).rows(self._described, Wanted(output=True))["output"].astype(np.float64)
        return Check(name, largest_difference(output * self._row_sums, self._book.output))

    def __str__(self) -> str:
        engine, difference = self.check
        check = f"largest difference from the {engine} engine: {significant(difference, 2)}"
        return "\n".join(filter(None, (str(self.steps), check, self.read_as())))

    def read_as(self, language: Language = "en") -> str:
        """A sentence on how inputs of three axes were read, since a batch of texts has three as well; else "".

        Raises RuleError for a language other than "en" and "zh".
        """
        problem = self.problem
        plain = len(problem.prefix) == 1 and "x" not in self._inputs and problem.heads == problem.kv_heads > 1
        per_head = problem.alibi_slopes is not None or problem.sinks is not None or len(set(problem.scale)) > 1
        return say(read_language(language), "three axes", heads=problem.heads) if plain and not per_head else ""

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
        rows, cols = token_names(tokens, source_tokens, self.problem)
        return self.document(Scene("attention, step by step", language, tokens=rows, sources=cols))

    def document(self, scene: Scene) -> Document:
        """The document of the page that explains this trace."""
        facts = {"check": both("check", engine=self.check.engine, difference=self.check.largest_difference)}
        whole = replace(scene, convention=self.convention, facts={**facts, **scene.facts})
        return story([self.layer()], whole)

    def layer(self, number: int | None = None) -> PageLayer:
        """One layer of a page's story: the inputs, tokens as rows, and the rules. Raises RuleError without q and k."""
        described, book = self._described, self._book
        assert described.v is not None
        if not hasattr(self, "scores"):
            raise RuleError(
                "a page computes the weights from q and k, and here the weights themselves were given.",
                "print(trace), or clearhead trace without --html, shows the steps.",
            )
        arrays = {name: getattr(described, name) for name in "qkv"} | {"logsumexp": book.logsumexp, **self._inputs}
        for name in {"x", "context"} & set(arrays):
            arrays[name] = arrays[name].reshape(-1, *arrays[name].shape[-2:])
        return PageLayer(self.problem, self.steps, arrays, number)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        cells = self.problem.queries * self.problem.keys
        return notebook.bundle(str(self), [self.to_html], self.to_svg, self.to_png, cells)

    def to_svg(self, head: int = 0, *, tokens: Any = None, source_tokens: Any = None) -> str:
        """One head's weights (queries, keys) as SVG text; `head` counts through the batch, batch·heads in all.

        Raises SelectionError for an unknown head, ShapeError for tokens of another number.
        """
        names = token_names(tokens, source_tokens, self.problem)
        return images.svg(*self._one(head), *names, name=f"A, head {head}" if self.problem.heads > 1 else "A")

    def to_png(self, head: int = 0, cell: int = 8) -> bytes:
        """One head's weights as a PNG file's bytes, cell × cell pixels for each weight; `head` as in `to_svg`.

        Raises SelectionError for an unknown head.
        """
        return images.png(*self._one(head), cell)

    def _one(self, head: int) -> tuple[Array, Array]:
        queries, keys = self.problem.queries, self.problem.keys
        weights, masked = (x.reshape(-1, queries, keys) for x in (self._book.weights, self._book.masked))
        head = read_place("head", head, len(weights))
        return weights[head], np.isneginf(masked[head])

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the layer's matrices and biases, such as w_q and b_o; empty without a layer."""
        return tuple(name for name in self._inputs if name[:2] in ("w_", "b_"))

    @property
    @np.errstate(invalid="ignore", over="ignore")
    def geometry(self) -> Geometry:
        """The norms of queries and keys, and the cosine of each pair: S_ij = ‖q_i‖·‖k_j‖·cos θ_ij."""
        problem, described = self.problem, self._described
        query_norms, key_norms = (np.linalg.norm(x.astype(np.float64), axis=-1) for x in (described.q, described.k))
        each = np.repeat(key_norms, problem.group, axis=1)
        product = query_norms[..., :, None] * each[..., None, :]
        cosine = np.divide(self._book.scores, product, out=np.zeros_like(product), where=product != 0)
        lead = (*problem.prefix[:-1], problem.kv_heads) if problem.prefix else ()
        arrays = problem.restore(query_norms), key_norms.reshape(*lead, problem.keys), problem.restore(cosine)
        return Geometry(*map(described.restore, (*arrays[:2], turned(arrays[2], self.convention))))

    def token(self, query: int) -> TokenTrace:
        """One query's attention, computed from q_i alone: it equals row i of the matrices, but for `difference`.

        Raises SelectionError for an unknown query. O(heads·keys·(d_k + d_v)).
        """
        problem, described = self.problem, self._described
        i = read_place("query", query, problem.queries)
        alone = problem.take(queries=range(i, i + 1))
        book = definition.attend(alone, described.q[:, :, i : i + 1], described.k, described.v)
        assert book.output is not None
        visible = ~np.isneginf(book.masked[:, :, 0, :, None])
        weighted = book.weights[:, :, 0, :, None] * np.where(visible, values_of(self), 0.0)
        rows = {name: getattr(book, name)[:, :, 0] for name in ("scores", "masked", "weights", "output")}
        return self._row(i, rows | {"contributions": np.where(visible, weighted, 0.0)})

    def _row(self, query: int, rows: dict[str, Array]) -> TokenTrace:
        """A query's arrays, (batch, heads, …), with the caller's axes, and how far they are from the whole matrix's."""
        book, restore = self._book, self._described.restore
        assert book.output is not None
        pairs = (rows["weights"], book.weights), (rows["output"], book.output)
        difference = max(largest_difference(row, whole[:, :, query]) for row, whole in pairs)
        restored: dict[str, Any] = {name: restore(self.problem.restore(row)) for name, row in rows.items()}
        return TokenTrace(query, **{"scores": None, "masked": None, **restored}, difference=difference)


def trace(q: Any, k: Any, v: Any, *, convention: Convention = "rows", **rules: Unpack[Rules]) -> Trace:
    """Attention step by step, every intermediate kept in float64: S = Q·Kᵀ, S/√d_k, …, A = softmax, O = A·V.

    q           (…, heads, queries, d_k), or (queries, d_k) for one head; any float dtype
    k           (…, kv_heads, keys, d_k)
    v           (…, kv_heads, keys, d_v)
    convention  "rows" for tokens as rows; "columns" for tokens as columns: (…, d_k, queries) and so on
    rules       as in `attention`

    Three axes are (heads, tokens, width), which the printed trace says: for a batch of texts with one head give
    q[:, None], and for x (batch, tokens, d_model) with its projections there is `trace_layer`.
    Returns a Trace of the kind of array that was given, in float64; its `check` holds the largest difference from the
    fast engine on the same inputs.
    Raises what `attention` raises, and RuleError for another convention. O(queries·keys·(d_k + d_v)) time and
    O(queries·keys) memory for each head: meant for short inputs.
    Source: Vaswani et al. 2017, section 3.2.1.

    >>> import numpy as np, clearhead as ch
    >>> t = ch.trace(np.array([[1, 3], [2, 0.5]]), np.array([[0.5, 2], [1, 3]]), np.array([[0.0, 4], [1, 2]]))
    >>> t.scores.tolist(), t.output.round(4).tolist()
    ([[6.5, 10.0], [2.0, 3.5]], [[0.9224, 2.1553], [0.7428, 2.5144]])
    """
    check_convention(convention)
    if convention == "columns":
        read = [as_array(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
        q, k, v = (restore(turned(array, convention)) for array, restore in read)
    described = describe_whole(q, k, v, rules)
    problem = described.problem
    book = definition.attend(problem, described.q, described.k, described.v)
    raw = {name: as_array(x, name)[0] for name, x in (("q", q), ("k", k), ("v", v))}
    sizes = Sizes.of(*(x.shape for x in raw.values()))
    steps = attention_steps(sizes, used_rules(rules), convention, problem.dtype.itemsize)
    return Trace(described, book, steps, raw | intermediates(problem, book), convention)


def values_of(traced: Trace) -> Array:
    """The values in float64, (batch, heads, keys, d_v): each query head with those of its key head."""
    problem, v = traced.problem, traced._described.v
    assert v is not None
    return np.repeat(v.astype(np.float64), problem.group, axis=1)


def listed(x: Any) -> Any:
    """An array as nested lists; -∞, ∞ and NaN, which JSON lacks, become None."""
    array = np.asarray(x, dtype=np.float64)
    if np.isfinite(array).all():
        return array.tolist()
    cells = array.astype(object)
    cells[~np.isfinite(array)] = None
    return cells.tolist()


def intermediates(problem: Problem, book: definition.Textbook) -> dict[str, Array]:
    """The intermediates from the scores to the output by name, with the axes of the caller's inputs."""
    names = ("scores", "scaled", "capped", "biased", "masked", "logsumexp", "weights", "output")
    return {name: problem.restore(getattr(book, name)) for name in names}


def used_rules(rules: Rules) -> Used:
    """Which rules are used, for the formulas."""
    words = {"query_segments": "segments", "kv_lengths": "key lengths", "query_lengths": "query lengths"}
    words |= {"alibi_slopes": "ALiBi"}

    def active(*names: str) -> tuple[str, ...]:
        asked = (name for name in names if rules.get(name) is not None and rules.get(name) is not False)
        return tuple(words.get(name, name) for name in asked)

    softcap, scale = rules.get("softcap"), rules.get("scale")
    return Used(
        scale="s_h" if has_axes(scale) else None if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        biased=active("bias", "alibi_slopes", "spans"),
        masked=active("causal", "window", "mask", "kv_lengths", "query_lengths", "query_segments"),
        sinks=rules.get("sinks") is not None,
    )


def largest_difference(a: Array, b: Array) -> float:
    """The largest difference, 0 where both are NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.max(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b)), initial=0.0))
