"""Errors in Chinese, for the command line: the library raises them in English, and the English template is the key."""

import re
from functools import cache

from clearhead.errors import Sentence
from clearhead.words import table

_FILLED_IN = (  # what Python's argparse and json say comes as a whole: these are its templates
    "argument {argument}: {reason}",
    "the following arguments are required: {arguments}",
    "unrecognized arguments: {arguments}",
    "invalid choice: {value} (choose from {choices})",
    "ignored explicit argument {value}",
    "ambiguous option: {option} could match {options}",
    "expected a whole number, not {value}",
    "{reason}: line {line} column {column} (char {place})",
    "Exceeds the limit ({limit} digits) for integer string conversion: value has {digits} digits; "
    "use sys.set_int_max_str_digits() to increase the limit",
)
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
    return template.format(**values) if values else template


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
    parts = [(template, re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>.+?)", re.escape(template))) for template in _FILLED_IN]
    return [(template, re.compile(pattern, re.DOTALL)) for template, pattern in parts]
