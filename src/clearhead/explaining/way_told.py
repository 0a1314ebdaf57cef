"""The way to a logit in words: what its parts are called, for the terminal and the page."""

from collections.abc import Sequence
from typing import Any

from clearhead.digits import significant
from clearhead.explaining.stream import NoWay
from clearhead.explaining.way import Way, WayNorm, WayPart
from clearhead.words import LANGUAGES, Language, say


def part_name(part: WayPart, d_model: int, language: Language) -> str:
    """What a part is, with its sizes."""
    if part.kind == "norm":
        assert part.read is not None
        return say(language, "way norm", **_lengths(part.read, d_model))
    if part.kind == "unembedding":
        return say(language, "way unembedding", d_model=d_model, vocabulary=f"{part.sizes[0]:,}")
    sizes = dict(zip(("heads", "d_k") if part.kind == "attention" else ("d_mlp",), part.sizes, strict=False))
    sized = bool(part.sizes) or part.kind not in ("attention", "mlp")
    return say(language, f"way {part.kind}" if sized else f"way {part.kind} alone", d_model=d_model, **sizes)


def norm_name(norm: WayNorm, d_model: int, language: Language) -> str:
    """A norm with the vector's length before and after it, and its σ."""
    return say(language, "way centred norm" if norm.centred else "way plain norm", **_lengths(norm, d_model))


def _lengths(norm: WayNorm, d_model: int) -> dict[str, object]:
    lengths = {name: significant(getattr(norm, name)) for name in ("before", "after", "sigma")}
    return {"d_model": d_model, **lengths}


def notes(found: Way, language: Language) -> list[str]:
    """How exact the sum is, what the numbers mean, and why some are 0."""
    exact = say(language, "way note", sigma=found.sigma, difference=found.difference)
    said = [exact, *(say(language, f"way {key}") for key in ("lens", "meaning", "zero", "last"))]
    return said if found.cap is None else [*said, say(language, "way cap", cap=significant(found.cap))]


def for_page(ways: Sequence[Way], no_way: NoWay | None = None) -> dict[str, Any] | None:
    """The numbers of all ways, and the words in both languages, of which the page puts in the texts of the tokens."""
    if not ways:
        return None if no_way is None else _refused(no_way)
    first = ways[0]
    return {
        "position": first.position,
        "parts": [{"kind": part.kind, "layer": part.layer} for part in first.parts],
        "choices": [_numbers(each) for each in ways],
        "words": {language: _words(first, language) for language in LANGUAGES},
    }


def _refused(no_way: NoWay) -> dict[str, Any]:
    words = {
        language: {"title": say(language, "way heading"), "no": _sentence(no_way.said(language), language)}
        for language in LANGUAGES
    }
    return {"words": words}


def _numbers(found: Way) -> dict[str, Any]:
    """Each number to seven digits: what is added up has two decimals."""
    return {
        "id": found.token,
        "text": found.text,
        "logit": found.logit,
        "adds": [_short(part.adds) for part in found.parts],
        "heads": [[_short(x) for x in part.heads] for part in found.parts],
        "bias": [_short(part.bias) for part in found.parts],
    }


def _words(found: Way, language: Language) -> dict[str, Any]:
    tokens, d_model = found.shape
    plain = ("adds", "sums", "of", "less", "nothing", "bias")
    between = {"next": "{next}", "other": "{other}", "token": "{token}"}
    return {
        **{name: say(language, f"way {name}") for name in plain},
        "title": say(language, "way title", **between),
        "minus": say(language, "way title minus", **between),
        "logit": say(language, "way logit", next="{next}"),
        "stream": say(language, "way stream", tokens=tokens, d_model=d_model, token="{token}"),
        "parts": [part_name(part, d_model, language) for part in found.parts],
        "norms": [_norms(part, d_model, language) for part in found.parts],
        "layers": {
            part.layer: say(language, "way layer", layer=part.layer) for part in found.parts if part.layer is not None
        },
        "notes": [_sentence(note, language) for note in notes(found, language)],
        "constant": _sentence(say(language, "way constant"), language),
    }


def _norms(part: WayPart, d_model: int, language: Language) -> list[str | None]:
    """The norms before and after a layer's part, each with the 0 that it adds."""
    norms = (part.read, part.wrote) if part.layer is not None else (None, None)
    return [norm and say(language, "way norm zero", norm=norm_name(norm, d_model, language)) for norm in norms]


def _sentence(text: str, language: Language) -> str:
    return text[0].upper() + text[1:] + ("." if language == "en" else "。")


def _short(x: float) -> float:
    return float(f"{x:.7g}")
