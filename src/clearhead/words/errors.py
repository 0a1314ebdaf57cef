"""Errors in Chinese, for the command line: the library raises them in English, and here their sentences are found.

Each entry is an English sentence as it is raised and the same in Chinese; {names} stand for what varies. What a
{reason}, {value} or {wanted} stands for is itself a sentence, or a part of one, where it has an entry.
"""

import re
from functools import cache

from clearhead.words import errors_arrays, errors_explain, errors_files, errors_options

CHINESE = {**errors_options.CHINESE, **errors_explain.CHINESE, **errors_files.CHINESE, **errors_arrays.CHINESE}
HOLE = re.compile(r"\{([a-z_]+)\}")
_SENTENCES = ("reason", "value", "wanted")


def in_chinese(sentence: str) -> str:
    """An error's sentence in Chinese; a sentence without an entry stays as it is.

    What it is about may stand before it, as in --off 'x': expected LAYER.HEAD.
    """
    best, about = _found(sentence), ""
    for colon in re.finditer(": ", sentence):
        rest = _found(sentence[colon.end() :])
        if rest is None or rest[0].endswith(".") != sentence.endswith("."):  # then it is but the end of one
            continue
        if best is None or _letters(rest[0]) >= _letters(best[0]):
            best, about = rest, f"{in_chinese(sentence[: colon.start()])}："
    if best is None:
        return sentence
    english, values = best
    values = {name: in_chinese(value) if name in _SENTENCES else value for name, value in values.items()}
    return about + HOLE.sub(lambda hole: values[hole[1]], CHINESE[english])


def _found(sentence: str) -> tuple[str, dict[str, str]] | None:
    """The entry for a whole sentence, and what varies in it."""
    for english, pattern in _patterns():
        match = pattern.fullmatch(sentence)
        if match is not None:
            return english, match.groupdict()
    return None


def _letters(english: str) -> int:
    """How many letters of an entry do not vary."""
    return len(HOLE.sub("", english))


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Each English sentence with its pattern; the one with the most letters that do not vary comes first."""
    longest = sorted(CHINESE, key=_letters, reverse=True)
    return [(english, re.compile(_pattern(english), re.DOTALL)) for english in longest]


def _pattern(english: str) -> str:
    parts, known = HOLE.split(english), set[str]()
    for place in range(1, len(parts), 2):
        name = parts[place]
        parts[place - 1] = re.escape(parts[place - 1])
        parts[place] = f"(?P={name})" if name in known else f"(?P<{name}>.+?)"
        known.add(name)
    return "".join([*parts[:-1], re.escape(parts[-1])])
