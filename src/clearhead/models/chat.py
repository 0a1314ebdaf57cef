"""Messages as one text, by the template that a model's file carries: Jinja, from a stranger, in a sandbox.

The sandbox is Jinja's own (no attributes that begin with _, nothing can be changed); beside it a template may take
`_SECONDS` and make a text of `_MOST` characters, and numbers are not multiplied into large texts.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

from clearhead.errors import FileError, MissingExtraError, RuleError, expected
from clearhead.models.folder import one_line
from clearhead.models.protocol import Token, first_letter

_SECONDS, _MOST = 2.0, 2**22
ROLES = ("system", "user", "assistant")


def read_messages(value: Any) -> list[dict[str, str]]:
    """A list of {"role": …, "content": …}; raises RuleError for anything else."""
    if not isinstance(value, (list, tuple)) or not value:
        raise RuleError(expected("messages", value, "a list of messages"), '[{"role": "user", "content": "hello"}]')
    for message in value:
        plain = isinstance(message, dict) and set(message) == {"role", "content"}
        if not plain or message["role"] not in ROLES or not isinstance(message["content"], str):
            wanted = "a role (system, user or assistant) and a content, which is a text"
            raise RuleError(expected("a message", message, wanted), '{"role": "user", "content": "hello"}')
    return [dict(message) for message in value]


def rendered(template: str, messages: Sequence[dict[str, str]], name: object, **words: str) -> str:
    """The text that a model is given for these messages, with the beginning of its answer.

    words   bos_token and eos_token
    Raises FileError where the template is broken, takes too long or refuses the messages.
    """
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError(
            "messages need Jinja, which is not installed.", 'pip install "clearhead[gguf]"'
        ) from error

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if (
                not all(isinstance(side, (int, float)) and abs(side) < 2**31 for side in (left, right))
                or operator == "**"
            ):
                raise TemplateError("it multiplies a text, or very large numbers")
            return super().call_binop(context, operator, left, right)

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals |= {"raise_exception": refuse, "strftime_now": time.strftime}
    try:
        with _deadline():
            made = environment.from_string(template).generate(
                messages=list(messages), add_generation_prompt=True, **words
            )
            text = ""
            for piece in made:
                text += piece
                if len(text) > _MOST:
                    raise TemplateError("its text has no end")
    except Exception as error:  # a stranger's template raises whatever it likes
        raise FileError(f"{name}: its chat template cannot be used: {one_line(error)}.") from None
    return text


def places(text: str, messages: Sequence[dict[str, str]]) -> list[tuple[int, int]]:
    """Where the contents of messages stand in a chat's text; templates may strip spaces around these."""
    spans, reached = [], 0
    for message in messages:
        content = message["content"]
        words = content if text.find(content, reached) >= 0 else content.strip()
        start = text.find(words, reached)
        if start >= 0:
            reached = start + len(words)
            spans.append((start, reached))
    return spans


def marked(tokens: Sequence[Token], text: str, messages: Sequence[dict[str, str]]) -> list[Token]:
    """The tokens of a chat's text, those marked that stand in no message; none where the template rewrites them all."""
    spans = places(text, messages) or [(0, len(text))]
    return [
        token._replace(template=not any(start <= first_letter(token, text) < stop for start, stop in spans))
        for token in tokens
    ]


@contextmanager
def _deadline() -> Any:
    """Inside, Python code that runs for more than `_SECONDS` is stopped; a template is compiled to Python code."""
    end, before = time.monotonic() + _SECONDS, sys.gettrace()

    def watch(_frame: Any, _event: str, _argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError("it takes too long")
        return watch

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
