"""Errors in Chinese, for the command line: the library raises them in English, and the English template is the key."""

import re
from functools import cache

from clearhead.errors import Sentence
from clearhead.words import table

_HAN = re.compile(r"[\u4e00-\u9fff]")


def in_chinese(sentence: str) -> str:
    """An error's sentence in Chinese, and the sentences in it; one without an entry stays as it is."""
    chinese = table("errors") | table("python")
    whole = sentence if isinstance(sentence, Sentence) else Sentence(sentence)
    if whole.template not in chinese and not whole.values:
        whole = _recognised(whole)
    if whole.template not in chinese:
        return str(sentence)
    template, values = chinese[whole.template]["zh"], dict(whole.values)
    for name, value in values.items():
        if isinstance(value, Sentence):  # a space sets off what is not Chinese
            values[name] = said = in_chinese(value)
            template = template.replace(f" {{{name}}}", f"{{{name}}}") if _HAN.match(said) else template
            template = template.replace(f"{{{name}}} ", f"{{{name}}}") if _HAN.match(said[-1:]) else template
    return str(Sentence(template, **values))


def _recognised(sentence: Sentence) -> Sentence:
    """A sentence of Python's with its template and values; any other as it is."""
    for template, pattern in _patterns():
        match = pattern.fullmatch(sentence)
        if match is not None:
            values = {name: Sentence(x) if name == "reason" else x for name, x in match.groupdict().items()}
            return Sentence(template, **values)
    return sentence


@cache
def _patterns() -> list[tuple[str, re.Pattern[str]]]:
    """What Python's argparse and json say comes as a whole: the templates of which it is made."""
    filled = [template for template in table("python") if "{" in template]
    parts = [(template, re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+?)", re.escape(template))) for template in filled]
    return [(template, re.compile(pattern, re.DOTALL)) for template, pattern in parts]
