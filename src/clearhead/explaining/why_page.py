"""The page's document of `ch.why`: the steps of the run, and above them what made one token lead over another."""

from collections.abc import Mapping, Sequence
from typing import Any

from clearhead.changing.edits import Edit
from clearhead.core.axes import Array
from clearhead.digits import fixed, percent
from clearhead.explaining.derivatives import derivatives, target_of
from clearhead.explaining.edit_checks import found_in
from clearhead.explaining.explain import explain
from clearhead.explaining.explanation import document as explained
from clearhead.explaining.gpt2 import Model
from clearhead.explaining.running import forward_pass
from clearhead.explaining.way import Way
from clearhead.explaining.way_told import for_page
from clearhead.view.container import Document
from clearhead.words import LANGUAGES, Language, say

_SHOWN = ("token", "against", "lead", "edges", "agreement", "by_token", "heads", "weights_alone")
_FOR_PAGE = {name: f"{{{name}}}" for name in ("token", "against", "query")}  # the page puts these texts in


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
    run = forward_pass(model, tokens, iter, found_in(edits, tokens, causes["text"]))
    target = target_of(run, causes["token"]["id"], causes["against"]["id"])
    return [layer.g for layer in derivatives(model, run, target).layers]


def _words(language: Language, causes: Mapping[str, Any]) -> dict[str, str]:
    """Every sentence of the section and the names of its columns."""
    token, against, lead, agreement = (causes[name] for name in ("token", "against", "lead", "agreement"))
    title = _FOR_PAGE if lead >= 0 else {"token": "{against}", "against": "{token}"}
    facts = {"logit": _number(token["logit"]), "other": _number(against["logit"]), "lead": _number(abs(lead))}
    shares = {"share": percent(token["probability"]), "other_share": percent(against["probability"])}
    count = {"count": len(causes["edges"]), "agreement": agreement}
    told = {
        "title": say(language, "why title", **title),
        "lead": say(language, "why lead" if lead >= 0 else "why behind", **_FOR_PAGE, **facts, **shares),
        "open": say(language, "why open"),
        "tokens": say(language, "why tokens", **_FOR_PAGE),
        "helped": say(language, "why minus", **_FOR_PAGE),
        "hurt": say(language, "why plus", **_FOR_PAGE),
        "sum": say(language, "why sum"),
        "edges": say(language, "why edges" if causes["edges"] else "why no edges"),
        "exact": say(language, "why exact"),
        "agreement": "" if agreement is None else f"{say(language, 'why agreement', **count)}{_STOP[language]}",
        "heads": say(language, "why heads"),
        "alone": say(language, "why weights", **_FOR_PAGE),
        "ends": say(language, "why direction"),
        "weight": say(language, "weight"),
        "estimate": say(language, "why estimate"),
        "truth": say(language, "why truth"),
        "rank": say(language, "why place", count=causes["edges_run_again"]),
    }
    return {name: text[:1].upper() + text[1:] if name in _HEADINGS else text for name, text in told.items()}


_STOP = {"en": ".", "zh": "。"}
_HEADINGS = ("tokens", "edges", "agreement", "heads", "alone")


def _number(x: float) -> str:
    return fixed(x, 2, 9).replace("-", "−")
