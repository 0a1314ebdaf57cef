"""`ch.explain`: a text is run through a model, and one token's attention in one head is shown step by step.

Everything here is data, taken from the run; `report` prints it.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.changing.edits_json import edits_to_json
from clearhead.core.axes import Array, brief, group_size
from clearhead.core.problem import describe
from clearhead.core.rule_values import is_whole, whole_number
from clearhead.core.rules import Rules
from clearhead.errors import SelectionError, shown
from clearhead.explaining import edit_checks
from clearhead.explaining.answer import CaptionedHead, answer_to_json, captioned_heads
from clearhead.explaining.gpt2 import SHIPPED, ForwardPass, LayerRun, Model, Token
from clearhead.explaining.moving import Moved, moved, probabilities
from clearhead.explaining.running import check_given, entropy_of, forward_pass, rules_of_head, steps_of
from clearhead.explaining.texts import find_token, parts_of
from clearhead.explaining.way import Way, likeliest
from clearhead.explaining.way_told import for_page
from clearhead.explaining.windows import Window, token_in, windows
from clearhead.ops.matrix import AttentionMatrix
from clearhead.textbook.page import Edited, PageLayer, Scene, both, story
from clearhead.textbook.shapes import Steps
from clearhead.textbook.trace import TokenTrace, Trace, listed, trace
from clearhead.view import notebook, page, picture
from clearhead.view.container import Document, narrowed
from clearhead.words import Language

if TYPE_CHECKING:
    from clearhead.explaining.hub import HubModel

_MOST_WEIGHTS = 16 * 2**20  # bytes of W^Q … W^O that go into a page


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
    next: list[Choice]  # after the whole text
    after: list[Choice]  # after the chosen token
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
    way: Way | None = None  # what each part adds to the logit of the token's likeliest next; None: not GPT-2's layout
    edits: tuple[Edit, ...] = ()  # of the attention in this run
    before: "Explanation | None" = None  # with edits: the run without them
    moved: Moved | None = None  # and what they moved
    following: Sequence[list[Choice]] = ()  # for each token what may come next; nothing where the model says none

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
        return (
            part
            | {
                "model": {"name": self.model.name, **config._asdict()},
                "text": self.text,
                "tokens": [token._asdict() for token in self.tokens],
                "next": [choice._asdict() for choice in self.next],
                "answer": self._answer_to_json(),
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
                "way": None if self.way is None else self.way.to_json(),
            }
            | self._edits_to_json()
        )

    def heads(self) -> list[CaptionedHead]:
        """Every head of every layer with its statistics over the whole text and a caption. O(tokens²·d_k) for each."""
        return captioned_heads(self.runs)

    def _answer_to_json(self) -> dict[str, Any]:
        """What the report opens with: what the chosen token attends to, what follows it, and the heads' captions."""
        return {"next": [choice._asdict() for choice in self.after], **answer_to_json(self.row, self.heads())}

    def _edits_to_json(self) -> dict[str, Any]:
        """What edits add: them, what they moved, what heads' outputs are multiplied by, and the run without them."""
        if self.before is None or self.moved is None:
            return {}
        factors = [None if run.factors is None else listed(run.factors) for run in self.runs]
        own = {"edits": json.loads(edits_to_json(self.edits)), "moved": self.moved.to_json(), "head_factors": factors}
        return own | {"before": self.before.to_json()}


def document(seen: Explanation, language: Language = "en") -> Document:
    """The page's document: every head of every layer, and the projections' weights of the chosen layer."""
    first = seen.before or seen
    config = seen.model.config
    chosen = {"layer": seen.layer, "head": seen.head, "query": seen.token}
    facts: dict[str, Any] = {
        "model": both(
            "model", name=_called(seen.model), layers=config.layers, heads=config.heads, d_model=config.d_model
        ),
        "illustration": seen.model.name == SHIPPED,
        "text": seen.text,
    } | _run_facts(first, seen.moved)
    scene = Scene(seen.text, language, tokens=parts_of(seen.tokens, seen.text).names, chosen=chosen, facts=facts)
    weights = _projections(seen.model, seen.layer)
    layers, after = ([_page_layer(each, number, weights) for number in range(config.layers)] for each in (first, seen))
    if seen.before is None:
        return story(layers, scene)
    return story(layers, scene, Edited([repr(edit) for edit in seen.edits], after, _run_facts(seen, seen.moved)))


def _run_facts(seen: Explanation, moved: Moved | None) -> dict[str, Any]:
    """The facts that differ from run to run: next tokens, also with the other run's probability, entropy, the check."""
    pairs = {token.id: (token.before, token.after) for token in moved.next} if moved else {}
    other = {i: pair[0] if seen.edits else pair[1] for i, pair in pairs.items()}
    return {
        "next": [[c.text, c.probability, *([other[c.id]] if moved else [])] for c in seen.next] or None,
        "following": [[[c.text, float(f"{c.probability:.6g}")] for c in each] for each in seen.following],
        "entropy": listed(seen.entropy),
        "check": both("check", engine=seen.trace.check.engine, difference=seen.trace.check.largest_difference),
        "way": for_page(seen.way, seen.model),
    }


def _page_layer(seen: Explanation, number: int, weights: Mapping[str, Array]) -> PageLayer:
    run = seen.runs[number]
    given = describe(run.q, run.k, run.v, cast("Rules", run.rules))
    logsumexp = np.asarray(AttentionMatrix(run.q, run.k, **run.rules).logsumexp())
    assert given.v is not None
    arrays = {"x": run.x[None], "q": given.q, "k": given.k, "v": given.v, "logsumexp": logsumexp[None]}
    arrays["output"] = run.output[None]
    if number == seen.layer:
        arrays |= weights
    steps = seen.steps if number == seen.layer else steps_of(run)
    return PageLayer(given.problem, steps, arrays, number, None if run.factors is None else run.factors.tolist())


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
    edits: Any = None,
    each: Callable[[range], Iterable[int]] = iter,
) -> Explanation:
    """Run `text` through a model and show one token's attention step by step: `clearhead explain` as an object.

    model         a directory in GPT-2 layout, a name that Transformers loads (extra `hf`), or a loaded model; None is
                  the small one that ships with clearhead, trained on nursery rhymes, for illustration
    layer, head   from 0; None takes the one whose row for the token has the least entropy; with edits the one of theirs
                  whose output for the token moved furthest
    token         a position (negative counts from the end) or a word of the text; None is the last
    count         how many next tokens to list
    edits         an edit or a list of edits, such as ch.cut(queries="on", keys="sat", layers=[0], heads=[3]): the text
                  is run with and without them. Any but like, values_like and off(to="mean")
    each          iterates over the model's layers, such as a progress bar

    Returns an Explanation: tokens, next (after the text) and after (the chosen token), steps (each intermediate's shape
    and formula), trace (the chosen head with its numbers in float64, (queries, keys) and (queries, d_v)), row (the
    chosen token alone), entropy (layers, heads) in nats; `heads()` says in a sentence what each head does; `save`,
    `to_html`, `to_json`. In a notebook it is shown as its page. With edits all this is of the run with them, `before`
    is the Explanation without, and `moved` has next tokens and heads by how far they moved.
    Raises DtypeError for a text or model of another type, SelectionError for an unknown layer, head or token and for an
    edit of what there is not or that changes nothing, RuleError for an edit that it does not show and for a count that
    is not a whole number, ShapeError for an empty text or one that is too long, FileError for a model that cannot be
    read, MissingExtraError where it needs Transformers. The forward pass takes O(tokens²·d_model + tokens·d_model²) for
    each layer; the chosen head's numbers take O(tokens²) memory.

    >>> import clearhead as ch
    >>> seen = ch.explain("humpty dumpty sat on")
    >>> seen.next[0].text, seen.trace.weights.shape
    (' a', (4, 4))
    >>> seen = ch.explain("mary had a little", edits=ch.cut(queries="little", keys="mary", layers=[0]))
    >>> seen.before.next[0].text, seen.next[0].text, seen.moved.heads(1)[0][:2]
    (' lamb', ' nut', (0, 3))
    """
    check_given(text, each)
    from clearhead.explaining.hub import find

    loaded, count = find(model), whole_number("count", count, 0)
    given = edit_checks.checked(edits, loaded.config.layers, loaded.config.heads, loaded.name)
    tokens = loaded.tokens(text)
    at = find_token(tokens, text, token)
    found = edit_checks.found_in(given, tokens, text)
    part, chosen = (text, tokens, None), (layer, head, at)
    if given:
        return _changed(loaded, part, chosen, count, each, (given, found))
    return _explained(loaded, part, chosen, count, each)


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
    wanted = [token_in(part, token) for part in found]
    if all(at is None for at in wanted):
        raise SelectionError(
            f"token {token!r} is neither a position 0..{found[0].window.tokens - 1} nor a word of the text."
        )
    pairs = zip(found, wanted, strict=True)
    return [_explained(model, part, (layer, head, at), count, each) for part, at in pairs if at is not None]


Part = tuple[str, list[Token], Window | None]
Chosen = tuple[int | None, int | None, int]


def _explained(
    model: "Model | HubModel", part: Part, chosen: Chosen, count: int, each: Callable[[range], Iterable[int]]
) -> Explanation:
    """One run, and its sharpest head where layer and head are not chosen."""
    _check_chosen(model, chosen)
    run = forward_pass(model, part[1], each)
    entropy = entropy_of(run, chosen[2])
    return _of_run(model, part, chosen, run, entropy, _least(entropy, *chosen[:2]), count)


def _changed(
    model: "Model | HubModel",
    part: Part,
    chosen: Chosen,
    count: int,
    each: Callable[[range], Iterable[int]],
    edits: tuple[Sequence[Edit], Sequence[Edit]],
) -> Explanation:
    """A run with edits, as they were given and by position, one without, and the edited head that moved furthest."""
    _check_chosen(model, chosen)
    given, found = edits
    after = forward_pass(model, part[1], each, found)
    edit_checks.check_acts(given, found, after.layers)
    before = forward_pass(model, part[1], each)
    what = moved(model, before, after, chosen[2], count)
    acts = edit_checks.heads_of(found, *what.distance.shape)
    place = _least(np.where(acts, -1 - what.distance, 1 / (1 + what.distance)), *chosen[:2])
    first, second = (
        _of_run(model, part, chosen, run, entropy_of(run, chosen[2]), place, count) for run in (before, after)
    )
    return replace(second, edits=tuple(given), before=first, moved=what)


def _of_run(
    model: "Model | HubModel",
    part: Part,
    chosen: Chosen,
    run: ForwardPass,
    entropy: Array,
    place: tuple[int, int],
    count: int,
) -> Explanation:
    layer, head = place
    ran = run.layers[layer]
    shared = head // group_size(len(ran.q), len(ran.k))
    steps = trace(ran.q[head], ran.k[shared], ran.v[shared], **rules_of_head(ran.rules, head))
    return Explanation(
        model=model,
        text=part[0],
        tokens=part[1],
        next=[] if run.logits is None else _next(model, run.logits[-1], count),
        after=[] if run.logits is None else _next(model, run.logits[chosen[2]], count),
        layer=layer,
        head=head,
        chosen=(chosen[0] is None, chosen[1] is None),
        token=chosen[2],
        run=ran,
        runs=run.layers,
        steps=steps_of(ran),
        trace=steps,
        row=steps.token(chosen[2]),
        entropy=entropy,
        window=part[2],
        following=[] if run.logits is None else [_next(model, row, count) for row in run.logits],
        way=likeliest(model, part[1], run, chosen[2]),
    )


def _called(model: "Model | HubModel") -> str:
    """A model's name as a page shows it: of a directory only its last part."""
    place = Path(model.name)
    return place.resolve().name if place.is_dir() else model.name


def _least(numbers: Array, layer: int | None, head: int | None) -> tuple[int, int]:
    """The place of the least of (layers, heads) numbers, in this layer and of this head where they are given."""
    allowed = np.full(numbers.shape, np.inf)
    rows = slice(None) if layer is None else layer
    cols = slice(None) if head is None else head
    allowed[rows, cols] = numbers[rows, cols]
    place = np.unravel_index(int(allowed.argmin()), numbers.shape)
    return int(place[0]), int(place[1])


def _next(model: "Model | HubModel", logits: Array, count: int) -> list[Choice]:
    """The likeliest tokens, without sorting the whole vocabulary."""
    some = np.sort(np.argpartition(-logits, min(count, len(logits) - 1))[:count])
    order, shares = some[np.argsort(-logits[some], kind="stable")], probabilities(logits)
    return [Choice(int(i), model.text(int(i)), float(shares[i])) for i in order]


def _check_chosen(model: "Model | HubModel", chosen: Chosen) -> None:
    _check_index("layer", chosen[0], model.config.layers)
    _check_index("head", chosen[1], model.config.heads)


def _check_index(name: str, value: int | None, size: int) -> None:
    if value is None:
        return
    if not is_whole(value) or not 0 <= value < size:
        raise SelectionError(f"{name} {shown(value)} is outside 0..{size - 1}: the model has {size} {name}s.")
