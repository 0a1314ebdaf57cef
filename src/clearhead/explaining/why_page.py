"""Makes the page of `ch.explain`: what made the answer, and, folded below it, the map and the steps of the run."""

import shlex
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.digits import fixed, percent, rounded
from clearhead.explaining.attribution import for_page
from clearhead.explaining.head_steps import document as explained
from clearhead.explaining.part_runs import anywhere
from clearhead.explaining.rerun import EdgeEffect, Rerun, likely, plain
from clearhead.explaining.steps import steps_of_text
from clearhead.explaining.texts import read
from clearhead.explaining.why_words import conclusion, gap_of, inside, leaks, of_answer, shared_by
from clearhead.models.model import SHIPPED
from clearhead.models.protocol import Choice, choices, layer_numbers
from clearhead.spelling import bare, cut
from clearhead.textbook.page import capitalised
from clearhead.view.container import Document
from clearhead.watching.pieces import words as words_of
from clearhead.words import LANGUAGES, Language, filled, say, table

_SHOWN = ("token", "against", "answer", "parts", "edges", "by_token", "heads")
_FOR_PAGE = {
    name: f"{{{name}}}" for name in ("token", "against", "answer", "first", "head")
}  # the page fills in these texts
_SAME = "shading parts part effect without head off numbers map steps template"  # after "why"
_WORDS = {name: f"why {name}" for name in _SAME.split()}  # sentences without further facts
_WORDS |= {"ends": "why edge", "weight": "weight", "truth": "why changes"}
_HEADINGS = ("parts", "edges", "carried", "grid")
_LIVE = (  # after "why": what the page fills in where its own runs say so
    *("so", "none", "little", "needs one", "needs each", "little of two", "needs one of two", "needs each of two"),
    *("either", "either of two", "list", "and", "others", "quoted", "replaced part", "repeated", "without it"),
    *("in place", "carries", "no head", "any text"),
)


class OtherNumber(NamedTuple):
    """Another question that the same runs answer: why one word of the answer, or why it rather than another token.

    token, against   the word, given what comes before it, and the token that it is compared with, or its runner-up
    by_head   the change of its y with each head off, (layers, heads)
    by_part   the change with each part hidden, (parts,); NaN if it was not run
    value     its y with nothing hidden or off
    edges     edges of the rows that predict the word, the strongest first; `truth` and `share` are the word's
    """

    token: Choice
    against: Choice
    by_head: Array
    by_part: Array
    value: float
    edges: list[EdgeEffect]


def document(seen: Any, language: Language) -> Document:
    """Make the page's document, with the entry `why`; the text is run again for its steps."""
    causes = seen.to_json()
    first = seen.heads[0]
    chosen: dict[str, Any] = {"layer": first.layer, "head": first.head, "token": len(seen.tokens) - 1}
    steps = steps_of_text(seen.reading, seen.model, **chosen)
    made = explained(steps, language, [each["layer"] for each in causes["heads"] + causes["edges"]])
    made.header["facts"]["way"] = for_page(seen.ways)
    kept = made.header["facts"]["kept"]
    words = {each: _words(each, seen) | {"kept": kept[each] if kept else ""} for each in LANGUAGES}
    numbers = [_number(each, seen, words) for each in numbers_of(seen)]
    causes["parts"] = [plain(part) for one in seen.ranked for part in (one, *inside(seen, one))]
    shown = {name: causes[name] for name in _SHOWN} | {"sink": seen.sink, "rival": seen.rivals.other, "words": words}
    shown |= {"value": seen.value, "many": shared_by(seen), "compared": seen.rivals.compared, "ran": _ran(seen)}
    shown["tokens"] = [token.text for token in seen.tokens]  # with the answer's tokens, which edges may name
    shown["tokens"] += [seen.model.tokenizer.text(token) for token in seen.again.based[0].run.ids[len(seen.tokens) :]]
    turns = [] if isinstance(seen.prompt, str) else read(seen.model, seen.prompt).turns
    places = [[i for i, token in enumerate(seen.tokens) if token.start < b and token.stop > a] for a, b in turns]
    spoken = zip(seen.prompt, places, strict=True) if len(turns) == len(seen.prompt) else ()  # no message is rewritten
    shown["turns"] = [(message["role"], place[0], place[-1] + 1) for message, place in spoken if place]
    shown["grid"] = rounded(-seen.estimate.heads_run if _ran(seen) else seen.estimate.by_head, 4)
    whole = {name: shown.get(name) for name in numbers[0]} if numbers and _ran(seen) else {}
    shown["numbers"] = [whole, *numbers] if whole else []
    texts = {"token": bare(seen.rivals.token.text), "rival": bare(seen.rivals.other)}
    title = f"{filled(words[language]['title'], answer=bare(seen.answer), **texts)} {seen.text}"
    header: dict[str, Any] = {**made.header, "why": shown, "title": title}
    if "live" in header:
        said = {each: {key: table("why")[f"why {key}"][each] for key in _LIVE} for each in LANGUAGES}
        others = anywhere(seen.again, list(np.ndindex(seen.estimate.by_head.shape)))
        header["live"] |= {"said": said, "anywhere": rounded(np.reshape(others, seen.estimate.by_head.shape), 6)}
    return replace(made, header=header)


def numbers_of(seen: Any) -> list[OtherNumber]:
    """Read from the runs why each word of the answer; for a single token, why it rather than other likely tokens."""
    again, (off, hidden, without), based = seen.again, seen.reruns, seen.again.based[0]
    target, sizes = based.target, (seen.estimate.by_head.shape, len(seen.parts))
    logits = np.stack([np.asarray(based.run.logits[row]) for row in target.rows])
    answer, several = target.answer, len(target.answer) > 1
    texts = again.model.tokenizer.texts(answer)
    spans = [[row for row, _ in word] for _, word in groupby(enumerate(words_of(texts)), lambda pair: pair[1])]
    if (several and len(spans) == 1) or (not several and (target.against is not None or len(again.based) > 1)):
        return []  # the answer is one word, or two answers are compared already
    ahead = [[i for i in row if i != token] for row, token in zip(likely(logits).tolist(), answer, strict=True)]
    asked = [(rows[0], ahead[rows[0]][0]) for rows in spans] if several else [(0, other) for other in ahead[0]]

    def said(now: Rerun) -> Array:
        if not several:
            return np.array([now.logits[answer[0]] - now.logits[other] for _, other in asked])
        sums = np.array([log_p(now, rows) for rows in spans])
        return np.asarray(sums - np.log(np.maximum(-np.expm1(sums), np.finfo(np.float64).tiny)))

    def log_p(now: Rerun, rows: list[int]) -> float:
        return float(-np.logaddexp(0.0, -now.odds[rows]).sum())

    run = Rerun(0.0, dict(enumerate(logits[0])), answer[0], 0.0, based.odds)
    base = said(run)
    by_head, by_part = np.full((len(asked), *sizes[0]), np.nan), np.full((len(asked), sizes[1]), np.nan)
    for (layer, head), now in off.items():
        by_head[:, layer, head] = said(now) - base
    for places, now in hidden.items():
        if len(places) == 1:  # sentences are not told apart here
            by_part[:, places[0]] = said(now) - base
    edges, numbers = [list[EdgeEffect]() for _ in asked], layer_numbers(again.model)
    for edge, now in without.items():
        layer, head, query, key = edge
        for listed, rows, change in zip(edges, spans if several else spans * len(asked), said(now) - base, strict=True):
            if query - target.rows.start in rows:
                weight, share = based.weights(layer, query)[head, key], np.exp(log_p(now, rows))
                listed.append(EdgeEffect(numbers[layer], head, query, key, float(weight), float(change), float(share)))
    pairs = [choices(again.model, logits[row], (answer[row], other)) for row, other in asked]
    ones, others = map(list, zip(*pairs, strict=True))
    for place, rows in enumerate(spans if several else ()):
        share = float(np.exp(log_p(run, rows)))
        ones[place] = ones[place]._replace(text="".join(texts[row] for row in rows), probability=share)
    ranked = [sorted(some, key=lambda edge: -abs(edge.truth)) for some in edges]
    return list(map(OtherNumber, ones, others, by_head, by_part, base.tolist(), ranked))


def _number(number: OtherNumber, seen: Any, words: Any) -> dict[str, Any]:
    """Make the page's data for another question: one word of the answer, or the answer against another token."""
    single = not _several(seen)
    edges = [edge._asdict() for edge in number.edges]
    by_place = {(edge["layer"], edge["head"]): edge for edge in reversed(edges)}  # the strongest of each head
    order = np.argsort(-np.abs(number.by_head), axis=None, kind="stable")[: len(seen.heads)]
    places, numbers = [divmod(place, number.by_head.shape[1]) for place in order.tolist()], layer_numbers(seen.model)
    named = [((numbers[layer], head), float(number.by_head[layer, head])) for layer, head in places]
    parts = [
        {**seen.parts[place]._asdict(), "effect": None, "hidden": float(number.by_part[place]), "share": None}
        for place in np.argsort(-np.abs(number.by_part), kind="stable").tolist()  # NaN last
        if np.isfinite(number.by_part[place])
    ]
    both = {"token": number.token, "against": number.against}
    other = replace(seen, rivals=seen.rivals._replace(**both, answer=number.token.text, compared=single))
    return {
        "name": (number.against if single else number.token).text,
        "token": number.token._asdict(),
        "against": number.against._asdict(),
        "answer": other.answer,
        "by_token": [
            -sum(part["hidden"] / len(part["tokens"]) for part in parts if i in part["tokens"])
            for i in range(len(seen.tokens))
        ],
        "parts": parts,
        "heads": [
            {"layer": place[0], "head": place[1], "truth": change, "edge": by_place.get(place)}
            for place, change in named
        ],
        "edges": edges[: len(seen.edges)],
        "grid": rounded(-number.by_head, 4),
        "words": {
            each: {**words[each], **_words(each, other), "gap": say(each, "why runs alone"), "so": ""}
            for each in LANGUAGES
        },
    } | {"rival": number.against.text, "value": number.value, "many": 1, "compared": single}


def _several(seen: Any) -> bool:
    """Has the answer more than one token?"""
    return len(seen.again.based[0].target.answer) > 1


def _ran(seen: Any) -> bool:
    """Was the model run again without each head? If not, the grid of all heads shows their effects."""
    return bool(np.isfinite(seen.estimate.heads_run).all())


def _words(language: Language, seen: Any) -> dict[str, str]:
    """Return every sentence of the section, and its column names."""
    logits = {"logit": seen.rivals.token.logit, "other": seen.rivals.against.logit, "lead": abs(seen.rivals.lead)}
    facts = {name: fixed(x, 2, 9).replace("-", "−") for name, x in logits.items()}
    shares = {
        "share": percent(seen.rivals.token.probability),
        "other_share": percent(seen.rivals.against.probability),
    }
    words = {name: say(language, key, **_FOR_PAGE) for name, key in _WORDS.items()}
    notes = ["replaced"] * any(part.replaced for part in seen.parts) + ["groups"] * bool(seen.groups) + ["exact"]
    single = seen.answer == seen.rivals.token.text and seen.rivals.compared
    behind = {"token": "{rival}", "against": "{token}"}
    title = _FOR_PAGE | (behind if seen.rivals.lead < 0 else {"against": "{rival}"})
    asked = shlex.quote(cut(seen.text, 60)) if isinstance(seen.prompt, str) else "--file CHAT.json"
    asked += "" if seen.model.name == SHIPPED else f" --model {seen.model.name}"
    words |= {
        "choose": say(language, "why token" if _several(seen) else "why rather"),
        "all": say(language, "why all" if _several(seen) else "why any"),
        "title": say(language, "why title" if single else "why title long", **title),
        "lead": say(language, "why lead" if seen.rivals.lead >= 0 else "why behind", **_FOR_PAGE, **facts, **shares),
        "carried": say(language, "why carried sink" if seen.sink else "why carried", **_FOR_PAGE),
        "grid": say(language, "why grid" if _ran(seen) else "why grid effects", count=seen.estimate.by_head.size),
        "edges": say(language, "why edges sink" if seen.sink else "why edges", **_FOR_PAGE),
        "elsewhere": say(language, "why elsewhere", command=f"clearhead explain {asked} --against WORD --html PAGE"),
        "gap": gap_of(seen, language),
        "so": " ".join([*leaks(seen, language), *conclusion(seen, language)]),
        "exact": " ".join(say(language, f"why {key}") for key in notes),
    }
    words["share"] = "× {rival}" if seen.rivals.compared else "p({token})"
    if shared_by(seen) > 1 and not seen.rivals.compared:
        words["share"] = of_answer(seen, language)
    return {name: capitalised(text) if name in _HEADINGS else text for name, text in words.items()}
