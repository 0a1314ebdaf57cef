"""Renders a chat's messages as one text with the template in a model's file, and finds each message in that text.

Templates are Jinja code from strangers. They are rendered as Transformers renders them: in Jinja's sandbox (no
attributes that begin with _, no changes to objects), with loop controls, `generation` blocks, `tojson`, `strftime_now`
and `raise_exception`. A template may run for `_SECONDS` and write `_MOST` characters, and may not multiply into a large
text.
"""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache, partial
from itertools import takewhile
from math import prod
from typing import Any

from clearhead.errors import FileError, RuleError, expected, needing
from clearhead.models.folder import one_line

_SECONDS, _MOST = 2.0, 2**22
_ROLES = ("system", "user", "assistant")
_FIRST_MARK = 0xF0000  # the private-use characters, which texts hardly ever have
Span = tuple[int, int]


def read_messages(value: Any) -> list[dict[str, str]]:
    """Check a list of {"role": …, "content": …} and return a copy; raise RuleError for anything else."""
    if not isinstance(value, (list, tuple)) or not value:
        raise RuleError(expected("messages", value, "a list of messages"), '[{"role": "user", "content": "hello"}]')
    for message in value:
        plain = isinstance(message, dict) and set(message) == {"role", "content"}
        if not plain or message["role"] not in _ROLES or not isinstance(message["content"], str):
            wanted = "a role (system, user or assistant) and a content that is a string"
            raise RuleError(expected("a message", message, wanted), '{"role": "user", "content": "hello"}')
    return [dict(message) for message in value]


def rendered(
    template: str, messages: Sequence[dict[str, str]], name: object, words: Mapping[str, str]
) -> tuple[str, list[Span], bool]:
    """Render messages as one text, and find each by rendering again with a mark before and after its words.

    words   the special tokens that a template may write, such as bos_token
    Returns the text, up to where the answer begins; the span of each message's content, (0, 0) for a message that the
    template leaves out; and whether the template writes today's date.
    A template may strip the spaces around a message, so the marks stand inside these. Where the marks change other text
    too, each message is searched for after the one before it. A template that writes no message is given each content
    as a list of parts, as templates of vision models expect it.
    Raises FileError where the template is broken, takes too long or refuses the messages.
    """
    render = _renderer(template, name, words)
    text, turns, dated = _found(render, messages)
    if not any(stop for _, stop in turns):
        with suppress(FileError):
            parts = _found(
                lambda given: render([{**one, "content": [{"type": "text", "text": one["content"]}]} for one in given]),
                messages,
            )
            if any(stop for _, stop in parts[1]) and "'type':" not in parts[0]:
                return parts
    return text, turns, dated


def _found(render: Any, messages: Sequence[dict[str, str]]) -> tuple[str, list[Span], bool]:
    """Render the messages, and find each in the text."""
    text, dated = render(messages)
    unused = (chr(number) for number in range(_FIRST_MARK, sys.maxunicode) if chr(number) not in text)
    marks = [(next(unused), next(unused)) for _ in messages]
    turns = _marked(render, text, messages, marks)
    if turns is None:
        turns, reached = [], 0
        for said in (message["content"].strip() for message in messages):
            start = text.find(said, reached) if said else -1
            turns.append((start, start + len(said)) if start >= 0 else (0, 0))
            reached = max(reached, turns[-1][1])
    return text, turns, dated


def _marked(
    render: Any, text: str, messages: Sequence[dict[str, str]], marks: Sequence[tuple[str, str]]
) -> list[Span] | None:
    """Find messages by a mark before and after each; return None if the marks change the rest of the text."""
    some, made = list[dict[str, str]](), ""
    for message, (before, behind) in zip(messages, marks, strict=True):
        content, words = message["content"], message["content"].strip()
        marked = content.replace(words, f"{before}{words}{behind}", 1) if words else content
        some.append({**message, "content": marked})
    with suppress(FileError):
        made = render(some)[0]
    places, plain = dict[str, int](), list[str]()
    known = {mark for pair in marks for mark in pair}
    for character in made:
        if character in known:
            places.setdefault(character, len(plain))
        else:
            plain.append(character)
    if "".join(plain) != text:
        return None
    turns = []
    for message, (before, behind) in zip(messages, marks, strict=True):
        words, start, stop = message["content"].strip(), places.get(before), places.get(behind)
        if start is None and stop is not None:  # a template may leave out how a message begins, such as its thoughts
            alike = zip(reversed(words), reversed(text[:stop]), strict=False)
            size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], alike))
            start = stop - len(text[stop - size : stop].lstrip())
        turns.append((start, stop) if start is not None and stop is not None else (0, 0))
    return turns


def _renderer(template: str, name: object, words: Mapping[str, str]) -> Any:
    """Return a function from messages to their text and whether the template asked for the date (that of now)."""
    with needing("Jinja", "a chat", "gguf"):
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    def times(left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, (str, list, tuple)) else abs(side) for side in (left, right)]
        numbers = all(isinstance(side, (int, float)) for side in (left, right))
        if max(sizes) >= 2**31 or (prod(sizes) > _MOST and not numbers):
            raise TemplateError("it multiplies very large numbers, or makes a text too long")
        return left * right

    def power(left: Any, right: Any) -> Any:
        if abs(left) >= 2**31 or abs(right) > 64:
            raise TemplateError("it raises to a large power")
        return left**right

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    def date(form: str) -> str:
        asked.append(form)
        return now.strftime(form)

    def tojson(
        x: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None, sort_keys: Any = 0
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    # `generation` only marks what the model says; like a `with` block it has its own scope.
    plain = re.sub(r"(\{%[-+]?\s*(?:end)?)generation(?=\s*[-+]?%\})", r"\1with", template)
    asked, now = list[str](), datetime.now()  # the local time, as Transformers has it
    options: Any = {"trim_blocks": True, "lstrip_blocks": True}
    environment = ImmutableSandboxedEnvironment(**options, extensions=["jinja2.ext.loopcontrols"])
    environment.intercepted_binops = frozenset(("*", "**"))
    environment.binop_table |= {"*": times, "**": power}
    environment.globals |= {"raise_exception": refuse, "strftime_now": date}
    environment.filters["tojson"] = tojson
    compiled = cache(partial(environment.from_string, plain))

    def render(messages: Sequence[dict[str, str]]) -> tuple[str, bool]:
        asked.clear()
        try:
            program = compiled()  # outside the deadline, which makes each line of Python slower
            with _deadline():
                given = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
                text = ""
                for piece in program.generate(**given, **words):
                    text += piece
                    if len(text) > _MOST:
                        raise TemplateError(f"its text is longer than {_MOST:,} characters")
        except Exception as error:  # a stranger's template raises whatever it likes
            raise FileError(f"{name}: its chat template cannot be used: {one_line(error)}.") from None
        return text, bool(asked)

    return render


@contextmanager
def _deadline() -> Iterator[None]:
    """Stop Python code inside the block after `_SECONDS`; Jinja compiles a template to Python code."""
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
