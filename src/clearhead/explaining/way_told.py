"""The way to a logit in words: what its parts are called, for the terminal and the page."""

from typing import Any

from clearhead.explaining.gpt2 import GPT2Config, Model
from clearhead.explaining.way import Way, WayPart
from clearhead.words import LANGUAGES, Language, say


def names(part: WayPart, config: GPT2Config, language: Language) -> tuple[str, str]:
    """Where a part belongs, and what it is with its sizes."""
    sizes = {"heads": config.heads, "d_k": config.d_model // config.heads}
    sizes |= {"d_model": config.d_model, "d_mlp": config.d_mlp}
    if part.layer is not None:
        return say(language, "way layer", layer=part.layer), say(language, f"way {part.kind}", **sizes)
    if part.kind == "norm":
        return say(language, "way norm"), say(language, "way norm bias")
    return say(language, "way embeddings"), say(language, f"way {part.kind}")


def notes(found: Way, language: Language) -> tuple[str, str]:
    """How exact the sum is, and what the numbers mean."""
    exact = say(language, "way note", sigma=found.sigma, difference=found.difference)
    return exact, say(language, "way meaning")


def for_page(found: Way | None, model: Any) -> dict[str, Any] | None:
    """The numbers, and the words in both languages, of which the page puts in the texts of the tokens."""
    if found is None or not isinstance(model, Model):
        return None
    words = {
        language: {
            "title": say(language, "way title", next="{next}", token="{token}"),
            "names": [names(part, model.config, language) for part in found.parts],
            "bias": say(language, "way bias"),
            "sum": say(language, "way sum", vocabulary=f"{model.config.vocabulary:,}"),
            "notes": notes(found, language),
        }
        for language in LANGUAGES
    }
    kept = ("position", "text", "logit")
    parts = [{name: getattr(part, name) for name in ("layer", "adds", "heads", "bias")} for part in found.parts]
    return {name: getattr(found, name) for name in kept} | {"parts": parts, "words": words}
