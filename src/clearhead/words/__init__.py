"""Every sentence in English and in Chinese: data files, one for each subject, and what fills them in.

An entry of a file such as learn.toml is a key with the sentence in each language; {names} stand for what varies:

    ["learn step"]
    en = "training step"
    zh = "训练步数"

In formulas.toml the key is the English itself.
"""

import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from string import Formatter
from typing import Any, Literal, cast

from clearhead.digits import significant
from clearhead.errors import RuleError, expected

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")
REPORTS = ("steps", "explain", "way", "why", "trace", "learn", "notebook")  # the files whose sentences `say` says


def read_language(value: Any) -> Language:
    """Read "en" or "zh". Raises RuleError."""
    if not isinstance(value, str) or value not in LANGUAGES:
        raise RuleError(expected("language", value, "'en' or 'zh'"), 'language="zh"')
    return cast("Language", str(value))


def of_locale(environment: Mapping[str, str] = os.environ) -> Language:
    """The language that a process's locale asks for, as gettext reads it: of commands and of a notebook's tables."""
    locale = next(filter(None, map(environment.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "C")
    if locale.partition(".")[0] in ("C", "POSIX"):  # then LANGUAGE does not count
        return "en"
    return "zh" if (environment.get("LANGUAGE") or locale).lower().startswith("zh") else "en"


@cache
def table(subject: str) -> dict[str, dict[Language, str]]:
    """The sentences of one file, by key and language; read when first asked for."""
    import tomllib

    return tomllib.loads(files("clearhead.words").joinpath(f"{subject}.toml").read_text(encoding="utf-8"))


@cache
def _sentences() -> dict[str, dict[Language, str]]:
    return {key: sentence for subject in REPORTS for key, sentence in table(subject).items()}


def in_formulas(language: Language) -> dict[str, str]:
    """The few words in the formulas of steps by their English, which is how they stand there."""
    return {} if language == "en" else {english: word[language] for english, word in table("formulas").items()}


def formula(language: Language, text: str) -> str:
    """A step's formula in the language asked for."""
    for english, word in in_formulas(language).items():
        text = text.replace(english, word)
    return text


def say(language: Language, key: str, **values: object) -> str:
    """One sentence in the language asked for."""
    return filled(_sentences()[key][language], **values)


def in_columns(key: str) -> str:
    """The key of the sentence where tokens are columns: another one where the sentence depends on it."""
    return other if (other := f"{key} columns") in _sentences() else key


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
