"""What `clearhead serve` runs: an answer as it comes and why, then the same run without a word, a head or an edge."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from clearhead.core.rule_values import is_whole
from clearhead.errors import SelectionError, ShapeError, expected
from clearhead.explaining import part_runs, rerun, why_page
from clearhead.explaining.answers import REPLY, probability
from clearhead.explaining.explain import explain
from clearhead.explaining.explanation import Explanation
from clearhead.explaining.part_runs import Again
from clearhead.explaining.rerun import Rerun
from clearhead.explaining.texts import parts_of_text, read
from clearhead.explaining.why_words import shared_by
from clearhead.models.finding import SHIPPED_HERE, load_model, models_here
from clearhead.models.protocol import Each, LanguageModel, Variant
from clearhead.models.tokenizer import Reading
from clearhead.textbook.page import opening
from clearhead.view.container import Document, parts
from clearhead.words import LANGUAGES, Language, table

_KINDS = {"word": "words", "sentence": "sentences"}  # of parts
_SAID, _AT_ONCE = 200, 16  # tokens of a reply; those after the first `REPLY`, which are explained, come so many at once


@dataclass(slots=True)
class Served:
    """The model that is loaded, one at a time, and the answer that was explained last."""

    name: str
    model: Any  # a LanguageModel
    language: Language
    found: Explanation | None = None
    number: int = 0  # of that answer
    first: str = ""  # the name of --model, which may be a path
    asked: dict[str, Any] = field(default_factory=dict)  # for that answer
    told: list[dict[str, Any]] = field(default_factory=list)  # of that answer, for a page that is loaded again


def page(served: Served) -> Document:
    """The page before anything is asked: the models on this machine and the one that runs."""
    here = [{name: each[name] for name in ("name", "size", "reason")} for each in _here(served)]
    words = {each: {"page": {key: said[each] for key, said in table("page_steps").items()}} for each in LANGUAGES}
    serve = {"models": here, "model": served.name, "shipped": SHIPPED_HERE, "last": served.found and served.asked}
    return Document({**opening([], "clearhead", served.language), "serve": serve, "words": words}, {})


def run(served: Served, asked: dict[str, Any], tell: Any, each: Each) -> None:
    """Answer what a page asks for with lines: {"said": the answer so far}, {"stage": …}, {"page": …}, {"without": …}.

    asked   {"model", "text", "before", …}: a text, or of a model with a chat's template a message and those before it;
            "answer" and "against" are those of `explain`; "again": what was told last, once more
            {"number", "word", "sentence", "head" or "edge"}: the run of an answer's number without one of these
    Raises SelectionError for what cannot be asked, and what `explain` raises.
    """
    if "number" in asked:
        if served.found is None or asked["number"] != served.number:
            raise SelectionError("another question was asked since: ask again.")
        tell({"without": without(served.found, asked, each)})
        return
    if asked.get("again") and served.found is not None:
        for line in served.told:
            tell(line)
        return
    served.number, served.found = served.number + 1, None  # frees its memory
    model, text = _model(served, asked.get("model")), _text(asked, "text")
    answer, against = (_text(asked, name) if asked.get(name) is not None else None for name in ("answer", "against"))
    chat = model.tokenizer.template is not None
    before = asked.get("before") or []
    prompt = [*(before if isinstance(before, list) else [before]), {"role": "user", "content": text}] if chat else text
    said = served.told[0]["said"] if answer is not None and served.told else ""
    if answer is None:
        ids = _said(model, read(model, prompt), tell, each, _SAID if chat else REPLY)
        said, explained = map(model.tokenizer.decoded, (ids, ids[:REPLY]))
        answer = explained if chat and explained else None

    def told(found: Explanation) -> None:
        tell({"stage": "heads" if any(part.hidden is not None for part in found.parts) else "parts"})

    served.found = found = explain(prompt, model, answer=answer, against=against, each=each, told=told)
    document = why_page.document(found, served.language)
    header = {name: entry for name, entry in document.header.items() if name != "live"}  # the server runs the model
    arrays = {name: array for name, array in document.arrays.items() if not name.startswith("live.")}
    texts = parts(replace(document, header=header, arrays=arrays))
    served.asked, served.told = asked, [{"said": said}, {"page": dict(texts), "number": served.number, "chat": chat}]
    tell(served.told[-1])


def _here(served: Served) -> list[dict[str, Any]]:
    """The models on this machine, and before them that of --model where it is none of these."""
    here, first = models_here(), served.first or SHIPPED_HERE
    return [*[{"name": first, "size": "", "reason": ""}][any(each["name"] == first for each in here) :], *here]


def _model(served: Served, name: Any) -> Any:
    """The model of this name, loaded in place of the other one. Raises SelectionError for one that is not listed."""
    if name not in (None, served.name):
        if name not in [each["name"] for each in _here(served) if not each["reason"]]:
            raise SelectionError(f"{name!r} is none of the models on this machine.")
        served.model, served.name = None, name
    if served.model is None:
        served.model = load_model(None if served.name == SHIPPED_HERE else served.name)
    return served.model


def _said(model: LanguageModel, reading: Reading, tell: Any, each: Each, most: int) -> list[int]:
    """The tokens that the model says after a text, told word by word."""
    ids, made, new, count = [token.id for token in reading.tokens], list[int](), [0], 1
    ran = rerun.forward_pass(model, reading.tokens, each)
    while len(made) < most and len(new) == count:
        count = 1 if len(made) < REPLY else _AT_ONCE
        try:
            new = model.generate([*ids, *made], count, each, ends=True, run=ran)
        except ShapeError:  # the text fills the model's positions
            break
        made += new
        if new:
            tell({"said": model.tokenizer.decoded(made)})
    return made


def without(found: Explanation, asked: dict[str, Any], each: Each) -> dict[str, Any]:
    """Run an answer again without a word, its sentence, a head or an edge: what y changes by, and the estimate of that.

    The estimate is of the page's runs: of a word what the integral says, of others a derivative times what is taken.
    Raises SelectionError for what the run does not have.
    """
    again = found.again._replace(based=[one._replace(each=each) for one in found.again.based])
    kind = next((name for name in ("word", "sentence", "head", "edge") if name in asked), "head")
    if kind in _KINDS:
        text, tokens, one, estimate = _less_text(found, again, kind, asked[kind])
    else:
        text, tokens, (one, estimate) = "", (), _less_attention(again, kind, asked.get(kind))
    changed, shares = again.changed(one), [found.probability]
    shares.append(changed["share"])
    if len(again.based[0].target.answer) > 1:
        shares = [probability(value, shared_by(found)) for value in (found.value, one.value)]
    facts = {"text": text, "hidden": tokens, "truth": changed["hidden"], "estimate": estimate}
    facts |= {"was": shares[0], "share": shares[1], "likeliest": changed["likeliest"].text}
    return facts | {"probability": changed["likeliest"].probability}


def _less_text(
    found: Explanation, again: Again, kind: str, place: Any
) -> tuple[str, tuple[int, ...], Rerun, float | None]:
    """The word or sentence of a token, its tokens, the run without it, and the estimate; None of a question."""
    (token,), whole = _places(place, kind, [len(found.tokens)]), [(0, len(found.text))]
    cut = parts_of_text(_KINDS[kind], found.text, found.tokens, found.reading.turns, whole)
    part = next((one for one in cut if token in one.tokens), None)
    if part is None:
        raise SelectionError("the last token, which answers, and a chat's template are never hidden.")
    (one,) = again.hidden([part.tokens])
    inside = [one.effect for one in found.parts if set(one.tokens) <= set(part.tokens)]
    return part.text, part.tokens, one, -sum(inside) if inside else None


def _less_attention(again: Again, kind: str, place: Any) -> tuple[Rerun, float | None]:
    """The run without a head or an edge, and the estimate; None of an edge before the rows that answer."""
    run, rows = again.based[0].run, again.based[0].target.rows
    sizes = [len(run.layers), again.model.config.heads, rows.stop, rows.stop]
    layer, head, *edge = _places(place, kind, sizes[: 4 if kind == "edge" else 2])
    if head >= len(run.layers[layer].q) or (edge and edge[0] < edge[1]):
        raise SelectionError(f"there is no {kind} {place}.")
    (one,) = rerun.without(again.model, again.based, [(layer, head, *edge)], again.rest)
    if edge and edge[0] not in rows:
        return one, None
    if edge:
        return one, float(part_runs.cuts(again)[layer, head, edge[0] - rows.start, edge[1]])
    estimate = 0.0
    for target, ran, *_ in again.based:
        slope = partial(lambda target, logits: target.value(logits)[1], target)
        back = again.model.differentiated(target.ids, [Variant()], target.rows, slope, ran)
        g, output = next((part.g[head], part.output[head]) for number, _, part in back if number == layer)
        estimate -= float((g * output)[-len(target.rows) :].sum())
    return one, estimate


def _places(value: Any, name: str, sizes: list[int]) -> list[int]:
    listed = value if isinstance(value, list) else [value]
    if len(listed) != len(sizes) or not all(map(is_whole, listed)):
        raise SelectionError(expected(name, value, f"{len(sizes)} whole numbers"))
    if not all(0 <= each < size for each, size in zip(listed, sizes, strict=True)):
        raise SelectionError(f"there is no {name} {value}.")
    return listed


def _text(asked: dict[str, Any], name: str) -> str:
    if not isinstance(value := asked.get(name), str) or not value.strip():
        raise SelectionError(expected(name, value, "a text that is not empty"))
    return value
