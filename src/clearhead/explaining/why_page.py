"""The page's document of `ch.why`: the steps of the run, and above them what made one token lead over another."""

from collections.abc import Mapping, Sequence
from typing import Any

from clearhead.changing.edits import Edit
from clearhead.core.axes import Array
from clearhead.digits import fixed, percent
from clearhead.explaining.attribution import Way
from clearhead.explaining.attribution_words import for_page
from clearhead.explaining.derivatives import derivatives, target_of
from clearhead.explaining.editing import by_position
from clearhead.explaining.explain import explain
from clearhead.explaining.explanation import document as explained
from clearhead.explaining.forward import forward_pass
from clearhead.models.model import Model
from clearhead.textbook.page import capitalised
from clearhead.view.container import Document
from clearhead.words import LANGUAGES, Language, say

_SHOWN = ("token", "against", "lead", "edges", "agreement", "by_token", "heads", "weights_alone")
_FOR_PAGE = {name: f"{{{name}}}" for name in ("token", "against", "query")}  # the page puts these texts in
_HEADINGS = ("tokens", "edges", "agreement", "heads", "alone")
_WORDS = {  # the page's names of sentences that have nothing else to put in
    "open": "why open",
    "tokens": "why tokens",
    "helped": "why minus",
    "hurt": "why plus",
    "sum": "why sum",
    "exact": "why exact",
    "heads": "why heads",
    "alone": "why weights",
    "ends": "why direction",
    "weight": "weight",
    "estimate": "why estimate",
    "truth": "why truth",
}


def document(
    model: Model, edits: Sequence[Edit], ways: Sequence[Way], causes: Mapping[str, Any], language: Language
) -> Document:
    """The page's document with the entry `why`; the text is run again for its steps and derivatives.

    ways     to the token and to the other one
    causes   as `Why.to_json` has them
    """
    first: Mapping[str, Any] = next(iter(causes["edges"]), {})
    chosen: dict[str, Any] = {"layer": first.get("layer"), "head": first.get("head"), "token": first.get("query")}
    seen = explain(causes["text"], model, **chosen, edits=list(edits) or None)
    made = explained(seen, language, _derivatives(model, edits, causes))
    words = {each: _words(each, causes) for each in LANGUAGES}
    of_run = made.header["edited"] if edits else made.header
    of_run["facts"]["way"] = for_page(ways)
    return Document({**made.header, "why": {name: causes[name] for name in _SHOWN} | {"words": words}}, made.arrays)


def _derivatives(model: Model, edits: Sequence[Edit], causes: Mapping[str, Any]) -> list[Array]:
    """Of each layer the derivative of the lead by its heads' outputs, (heads, tokens, d_v), in the run with edits."""
    tokens = model.tokens(causes["text"])
    run = forward_pass(model, tokens, iter, by_position(edits, tokens, causes["text"]))
    target = target_of(run, causes["token"]["id"], causes["against"]["id"])
    return [layer.g for layer in derivatives(model, run, target).layers]


def _words(language: Language, causes: Mapping[str, Any]) -> dict[str, str]:
    """Every sentence of the section and the names of its columns."""
    token, against, lead, agreement = (causes[name] for name in ("token", "against", "lead", "agreement"))
    ahead, count = lead >= 0, len(causes["edges"])
    title = _FOR_PAGE if ahead else {"token": "{against}", "against": "{token}"}
    facts = {"logit": _number(token["logit"]), "other": _number(against["logit"]), "lead": _number(abs(lead))}
    shares = {"share": percent(token["probability"]), "other_share": percent(against["probability"])}
    words = {name: say(language, key, **_FOR_PAGE) for name, key in _WORDS.items()}
    words |= {
        "title": say(language, "why title", **title),
        "lead": say(language, "why lead" if ahead else "why behind", **_FOR_PAGE, **facts, **shares),
        "edges": say(language, "why edges" if count else "why no edges"),
        "agreement": "",
        "rank": say(language, "why place", count=causes["edges_run_again"]),
    }
    if agreement is not None:
        words["agreement"] = capitalised(say(language, "why agreement", count=count, agreement=agreement), language)
    return {name: capitalised(text) if name in _HEADINGS else text for name, text in words.items()}


def _number(x: float) -> str:
    return fixed(x, 2, 9).replace("-", "−")
