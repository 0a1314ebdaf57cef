"""The page's document of `ch.why`: the steps of the run, and above them what made the answer."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from clearhead.core.axes import Array
from clearhead.digits import fixed, percent, signed
from clearhead.explaining.attribution_words import for_page
from clearhead.explaining.derivatives import derivatives, target_of
from clearhead.explaining.explain import explain
from clearhead.explaining.explanation import document as explained
from clearhead.models.model import Model
from clearhead.textbook.page import capitalised
from clearhead.view.container import Document
from clearhead.words import LANGUAGES, Language, say

_SHOWN = ("token", "against", "parts", "edges", "by_token", "heads")
_FOR_PAGE = {name: f"{{{name}}}" for name in ("token", "against", "first")}  # the page puts these texts in
_WORDS = {  # the page's names of sentences that have nothing else to put in
    "open": "why open",
    "helped": "why minus",
    "hurt": "why plus",
    "sum": "why sum",
    "exact": "why exact",
    "parts": "why parts",
    "part": "why part",
    "effect": "why effect",
    "hidden": "why hidden",
    "share": "why share",
    "heads": "why heads",
    "ends": "why edge",
    "weight": "weight",
    "truth": "why changes",
}
_HEADINGS = ("parts", "edges", "heads", "tokens")


def document(seen: Any, language: Language) -> Document:
    """The page's document of a Why, with the entry `why`; the text is run again for its steps and derivatives."""
    causes = seen.to_json()
    first: Mapping[str, Any] = next((edge for edge in causes["edges"] if edge["query"] < len(seen.tokens)), {})
    chosen: dict[str, Any] = {"layer": first.get("layer"), "head": first.get("head"), "token": first.get("query")}
    steps = explain(seen.prompt, seen.model, **chosen, edits=list(seen.edits) or None)
    made = explained(steps, language, _derivatives(seen))
    of_run = made.header["edited"] if seen.edits else made.header
    of_run["facts"]["way"] = for_page(seen.ways)
    words = {each: _words(each, seen) for each in LANGUAGES}
    causes["parts"].sort(key=lambda part: -abs(part["effect"]))
    return Document({**made.header, "why": {name: causes[name] for name in _SHOWN} | {"words": words}}, made.arrays)


def _derivatives(seen: Any) -> list[Array] | None:
    """Of each layer the derivative of the lead by its heads' outputs, (heads, tokens, d_v); none through PyTorch."""
    run = seen.based[0].run
    if not isinstance(seen.model, Model) or len(run.ids) != len(seen.tokens):
        return None
    target = target_of(run, seen.token.id, seen.against.id)
    return [np.asarray(layer.g) for layer in derivatives(seen.model, run, target).layers]


def _words(language: Language, seen: Any) -> dict[str, str]:
    """Every sentence of the section and the names of its columns."""
    facts = {"logit": _number(seen.token.logit), "other": _number(seen.against.logit), "lead": _number(abs(seen.lead))}
    shares = {"share": percent(seen.token.probability), "other_share": percent(seen.against.probability)}
    words = {name: say(language, key, **_FOR_PAGE) for name, key in _WORDS.items()}
    title = _FOR_PAGE if seen.lead >= 0 else {"token": "{against}", "against": "{token}"}
    words |= {
        "title": say(language, "why title", **title),
        "lead": say(language, "why lead" if seen.lead >= 0 else "why behind", **_FOR_PAGE, **facts, **shares),
        "tokens": say(language, "why shaded"),
        "edges": say(language, "why edges sink" if seen.sink else "why edges", **_FOR_PAGE),
        "gap": say(language, "why gap", gap=signed(seen.gap), total=signed(seen.total), points=seen.points),
        "sink": "",
    }
    if seen.sink:
        words["sink"] = say(language, "why sink", token="{first}", sinks=seen.sinks, heads=seen.by_head.size)
    return {name: capitalised(text) if name in _HEADINGS else text for name, text in words.items()}


def _number(x: float) -> str:
    return fixed(x, 2, 9).replace("-", "−")
