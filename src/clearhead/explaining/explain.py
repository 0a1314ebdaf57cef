"""`ch.explain`: a text is run through a model, and one token's attention in one head is shown step by step."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.changing.edits import Edit
from clearhead.core.axes import Array, group_size
from clearhead.core.rule_values import is_whole, whole_number
from clearhead.errors import SelectionError, shown
from clearhead.explaining import edit_checks
from clearhead.explaining.generating import check_generates, continued
from clearhead.explaining.gpt2 import ForwardPass, Model, Token
from clearhead.explaining.moving import moved, probabilities
from clearhead.explaining.running import check_given, entropy_of, followed, rules_of_head, steps_of
from clearhead.explaining.stream import NoWay, Stream
from clearhead.explaining.texts import find_token
from clearhead.explaining.way import way
from clearhead.explaining.windows import Window, token_in, windows
from clearhead.textbook.trace import trace

if TYPE_CHECKING:
    from clearhead.explaining.hub import HubModel

from clearhead.explaining.explanation import Choice, Explanation


def explain(
    text: str,
    model: "str | os.PathLike[str] | Model | HubModel | None" = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    token: int | str | None = None,
    count: int = 5,
    edits: Any = None,
    generate: int = 0,
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
    generate      how many tokens to put after the text first, each the likeliest; then all of it is explained
    each          iterates over the model's layers, such as a progress bar

    Returns an Explanation: tokens, next (after the text) and after (the chosen token), steps (each intermediate's shape
    and formula), trace (the chosen head with its numbers in float64, (queries, keys) and (queries, d_v)), row (the
    chosen token alone), entropy (layers, heads) in nats; `heads()` says in a sentence what each head does; `save`,
    `to_html`, `to_json`. In a notebook it is shown as its page. With edits all this is of the run with them, `before`
    is the Explanation without, and `moved` has next tokens and heads by how far they moved.
    Raises DtypeError for a text or model of another type, SelectionError for an unknown layer, head or token and for an
    edit of what there is not or that changes nothing, RuleError for an edit that it does not show, for edits with
    generate, and for counts that are no whole numbers, ShapeError for an empty text or one that is too long, FileError
    for a model that cannot be read, MissingExtraError where it needs Transformers. The forward pass takes
    O(tokens²·d_model + tokens·d_model²) for each layer; the chosen head's numbers take O(tokens²) memory.

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
    more = whole_number("generate", generate, 0)
    check_generates(more, edited=bool(given))
    tokens = continued(loaded, loaded.tokens(text), more)
    text += "".join(token.text for token in tokens[len(tokens) - more :])
    at = find_token(tokens, text, token)
    found = edit_checks.found_in(given, tokens, text)
    part, chosen = (text, tokens, None), (layer, head, at)
    if given:
        return _changed(loaded, part, chosen, count, each, (given, found))
    return replace(_explained(loaded, part, chosen, count, each), generated=more)


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


_SAMPLED = 10  # next tokens that a page shows at any temperature
Part = tuple[str, list[Token], Window | None]
Chosen = tuple[int | None, int | None, int]


def _explained(
    model: "Model | HubModel", part: Part, chosen: Chosen, count: int, each: Callable[[range], Iterable[int]]
) -> Explanation:
    """One run, and its sharpest head where layer and head are not chosen."""
    _check_chosen(model, chosen)
    run, stream = followed(model, part[1], each, chosen[2])
    entropy = entropy_of(run, chosen[2])
    return _of_run(model, part, chosen, (run, stream), entropy, _least(entropy, *chosen[:2]), count)


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
    second = followed(model, part[1], each, chosen[2], found)
    edit_checks.check_acts(given, found, second[0].layers)
    first = followed(model, part[1], each, chosen[2])
    before, after = first[0], second[0]
    what = moved(model, before, after, chosen[2], count)
    acts = edit_checks.heads_of(found, *what.distance.shape)
    place = _least(np.where(acts, -1 - what.distance, 1 / (1 + what.distance)), *chosen[:2])
    without, changed = (
        _of_run(model, part, chosen, ran, entropy_of(ran[0], chosen[2]), place, count) for ran in (first, second)
    )
    return replace(changed, edits=tuple(given), before=without, moved=what)


def _of_run(
    model: "Model | HubModel",
    part: Part,
    chosen: Chosen,
    ran_through: tuple[ForwardPass, Stream | NoWay | None],
    entropy: Array,
    place: tuple[int, int],
    count: int,
) -> Explanation:
    layer, head = place
    run, stream = ran_through
    after = [] if run.logits is None else _next(model, run.logits[chosen[2]], max(1, count))
    ran = run.layers[layer]
    shared = head // group_size(len(ran.q), len(ran.k))
    steps = trace(ran.q[head], ran.k[shared], ran.v[shared], **rules_of_head(ran.rules, head))
    return Explanation(
        model=model,
        text=part[0],
        tokens=part[1],
        next=[] if run.logits is None else _next(model, run.logits[-1], count),
        after=after[:count],
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
        logits=None if run.logits is None else run.logits[-1],
        sampled=() if run.logits is None else _next(model, run.logits[-1], _SAMPLED),
        ways=[way(stream, choice.id, choice.text) for choice in after] if isinstance(stream, Stream) else (),
        no_way=stream if isinstance(stream, NoWay) else None,
    )


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
