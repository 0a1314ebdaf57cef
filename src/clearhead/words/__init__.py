"""Every sentence the reports say, in English and in Chinese: one table for each report, and what fills them in."""

from string import Formatter
from typing import Any, Literal

from clearhead.digits import significant
from clearhead.words import explain, learn, steps, trace, way, why

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


_WORDS = {**steps.WORDS, **explain.WORDS, **way.WORDS, **why.WORDS, **trace.WORDS, **learn.WORDS}


IN_FORMULAS = {
    ", -∞ where forbidden": "，不可关注处为 -∞",
    ", each row": "，逐行",
    ", each column": "，逐列",
    "sink": "汇点",
}


def formula(language: Language, text: str) -> str:
    """A step's formula; the few words in it in the language asked for."""
    if language == "zh":
        for english, chinese in IN_FORMULAS.items():
            text = text.replace(english, chinese)
    return text


def say(language: Language, key: str, **values: object) -> str:
    """One sentence in the language asked for."""
    return filled(_WORDS[key][language == "zh"], **values)


def slider_words(language: Language, slider: str) -> dict[str, str]:
    """What the page needs for a slider that plays."""
    return {"slider": slider} | {name: say(language, f"slider {name}") for name in ("play", "pause", "forward")}


def in_columns(key: str) -> str:
    """The key of the sentence where tokens are columns: another one where the sentence depends on it."""
    return other if (other := f"{key} columns") in _WORDS else key


def filled(sentence: str, **values: object) -> str:
    """A sentence with its values in place; {x:.3g} prints three significant digits, as everywhere in the reports."""
    return _FILL.format(sentence, **values)


def counted(many: int, noun: str) -> str:
    """In English: one row, 3 rows, 12,000 queries."""
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"one {noun}" if many == 1 else f"{many:,} {plural}"


class _Fill(Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if isinstance(value, float) and format_spec.endswith("g"):
            return significant(value, int(format_spec.strip(".g")))
        return super().format_field(value, format_spec)


_FILL = _Fill()
