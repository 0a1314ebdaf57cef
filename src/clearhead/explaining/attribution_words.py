"""The way to a logit in words: what its parts are called, for the terminal and the page."""

from collections.abc import Sequence
from typing import Any

from clearhead.digits import rounded, significant
from clearhead.explaining.attribution import Norm, Way, WayPart
from clearhead.textbook.page import capitalised
from clearhead.words import LANGUAGES, Language, say

_SIZES = {"attention": ("heads", "d_k"), "mlp": ("d_mlp",)}


def part_name(part: WayPart, d_model: int, language: Language) -> str:
    """What a part is, with its sizes."""
    if part.kind == "norm":
        assert part.read is not None
        return say(language, "way norm", **_lengths(part.read, d_model))
    if part.kind == "unembedding":
        return say(language, "way unembedding", d_model=d_model, vocabulary=f"{part.sizes[0]:,}")
    alone = "" if part.sizes or part.kind not in _SIZES else " alone"
    sizes = dict(zip(_SIZES.get(part.kind, ()), part.sizes, strict=False))
    return say(language, f"way {part.kind}{alone}", d_model=d_model, **sizes)


def norm_name(norm: Norm, d_model: int, language: Language) -> str:
    """A norm with the vector's length before and after it, and its σ."""
    return say(language, "way centred norm" if norm.centred else "way plain norm", **_lengths(norm, d_model))


def _lengths(norm: Norm, d_model: int) -> dict[str, object]:
    lengths = {name: significant(getattr(norm, name)) for name in ("before", "after", "sigma")}
    return {"d_model": d_model, **lengths}


def notes(way: Way, language: Language) -> list[str]:
    """How exact the sum is, what the numbers mean, and why some are 0."""
    exact = say(language, "way note", sigma=way.sigma, difference=way.difference)
    means = [say(language, f"way {key}") for key in ("lens", "meaning", "zero", "last")]
    cap = [] if way.cap is None else [say(language, "way cap", cap=significant(way.cap))]
    return [exact, *means, *cap]


def for_page(ways: Sequence[Way]) -> dict[str, Any] | None:
    """The numbers of all ways, and the words in both languages, of which the page puts in the texts of the tokens."""
    if not ways:
        return None
    return {
        "position": ways[0].position,
        "parts": [{"kind": part.kind, "layer": part.layer} for part in ways[0].parts],
        "choices": [
            {"id": way.token, "text": way.text, "logit": way.logit}  # what is added up has two decimals
            | {name: rounded([getattr(part, name) for part in way.parts], 7) for name in ("adds", "heads", "bias")}
            for way in ways
        ],
        "words": {language: _words(ways[0], language) for language in LANGUAGES},
    }


def _words(way: Way, language: Language) -> dict[str, Any]:
    tokens, d_model = way.shape
    plain = ("adds", "sums", "of", "less", "nothing", "bias")
    between = {"next": "{next}", "other": "{other}", "token": "{token}"}
    layers = [part.layer for part in way.parts if part.layer is not None]
    return {
        **{name: say(language, f"way {name}") for name in plain},
        "title": say(language, "way title", **between),
        "minus": say(language, "way title minus", **between),
        "logit": say(language, "way logit", **between),
        "stream": say(language, "way stream", tokens=tokens, d_model=d_model, token="{token}"),
        "parts": [part_name(part, d_model, language) for part in way.parts],
        "norms": [_norms(part, d_model, language) for part in way.parts],
        "layers": {layer: say(language, "way layer", layer=layer) for layer in layers},
        "notes": [capitalised(note, language) for note in notes(way, language)],
        "constant": capitalised(say(language, "way constant"), language),
    }


def _norms(part: WayPart, d_model: int, language: Language) -> list[str | None]:
    """The norms before and after a layer's part, each with the 0 that it adds."""
    norms = (part.read, part.wrote) if part.layer is not None else (None, None)
    return [norm and say(language, "way norm zero", norm=norm_name(norm, d_model, language)) for norm in norms]
