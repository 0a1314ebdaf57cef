"""A model's tokenizer: texts and chats as tokens, tokens as text. One for decoders in NumPy and for Transformers'.

Messages become one text by the template that a model's file carries: Jinja, from a stranger, in Jinja's sandbox (no
attributes that begin with _, nothing can be changed). Beside it a template may take `_SECONDS` and make a text of
`_MOST` characters, and numbers are not multiplied into large texts.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from clearhead.errors import FileError, MissingExtraError, RuleError, ShapeError, expected
from clearhead.models.folder import one_line
from clearhead.models.protocol import Token, first_letter

_SECONDS, _MOST = 2.0, 2**22
_ROLES = ("system", "user", "assistant")
_BORDERS = "<|endoftext|>", "<s>"  # tokens that say least at the start of a text
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's vocabulary spells as themselves
_BYTES = {chr(byte): byte for byte in _VISIBLE} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _VISIBLE)
}


@dataclass(frozen=True, eq=False, slots=True)
class Tokenizer:
    """What cuts a model's texts: a tokenizer of the library `tokenizers`, and what the model's files say of it.

    name         the model's, for errors
    encoder      a tokenizers.Tokenizer
    positions    how many tokens the model takes; None: any number
    vocabulary   how many tokens the model has
    template     of chats, in Jinja; None: the model has none
    begin, end   the texts of the tokens that begin and end a text
    """

    name: str
    encoder: Any
    positions: int | None
    vocabulary: int
    template: str | None = None
    begin: str = ""
    end: str = ""

    def tokens(self, text: str) -> list[Token]:
        """Cut `text` into tokens. Raises ShapeError when it is empty or longer than the model's positions."""
        return self._tokens(self.encoder.encode(text), text)

    def chat(self, messages: Any) -> tuple[str, list[Token]]:
        """The text that the model is given for messages, and its tokens; those of the template are marked.

        messages   a list of {"role": "system", "user" or "assistant", "content": a text}
        Raises RuleError for a model without a template and for what is no message, FileError for a broken template.
        """
        read = read_messages(messages)
        if self.template is None:
            raise RuleError(f"{self.name} has no chat template.", "give it a text.")
        text = rendered(self.template, read, self.name, bos_token=self.begin, eos_token=self.end)
        return text, marked(self._tokens(self.encoder.encode(text, add_special_tokens=False), text), text, read)

    def fits(self, tokens: int) -> None:
        """Raise ShapeError for more tokens than the model has positions."""
        if self.positions is not None and tokens > self.positions:
            raise ShapeError(
                f"the text has {tokens} tokens but the model has {self.positions} positions.",
                "take a part of it, or with --model one with more positions: "
                "openai-community/gpt2 has 1,024, HuggingFaceTB/SmolLM2-135M 8,192, Qwen/Qwen3-0.6B 40,960.",
            )

    def text(self, token: int) -> str:
        """A token's own text; bytes that are no whole character in hexadecimal, ⟨e7⟩."""
        spelling = self.encoder.id_to_token(token)
        if spelling is not None and "▁" in spelling:  # SentencePiece's space, which decoding one token may drop
            return str(spelling).replace("▁", " ")
        decoded: str = self.encoder.decode([token], skip_special_tokens=False)
        return decoded if decoded and "\ufffd" not in decoded else hexadecimal(str(spelling))

    def continuation(self, text: str) -> list[int]:
        """The ids of a text that follows another, without special tokens."""
        ids: list[int] = self.encoder.encode(text, add_special_tokens=False).ids
        return ids

    def decoded(self, ids: list[int]) -> str:
        """The text of tokens that follow one another, without special ones."""
        return str(self.encoder.decode(ids))

    @property
    def neutral(self) -> int:
        """The token that says least at the start of a text: its beginning, a border of documents, or a new line.

        A token that the chat template writes begins messages and no text.
        """
        ids, template = self.encoder.get_vocab(), self.template or ""
        borders = (word for word in (self.begin, *_BORDERS) if word and word in ids and word not in template)
        return ids[word] if (word := next(borders, None)) else (self.continuation("\n") or [0])[-1]

    @property
    def last(self) -> int | None:
        """The id of the token that ends a text; None where there is none."""
        number: int | None = self.encoder.token_to_id(self.end) if self.end else None
        return number

    def _tokens(self, encoded: Any, text: str) -> list[Token]:
        if not encoded.ids or not text:
            raise ShapeError(
                "the text is empty: there is no token to explain.", 'clearhead explain "humpty dumpty sat on"'
            )
        if (top := max(encoded.ids)) >= self.vocabulary:
            raise FileError(f"the tokenizer gives id {top} but the model's vocabulary has {self.vocabulary} tokens.")
        self.fits(len(encoded.ids))
        return [Token(i, self.text(i), *span) for i, span in zip(encoded.ids, encoded.offsets, strict=True)]


def hexadecimal(spelling: str) -> str:
    """A byte-level vocabulary's spelling of some bytes as their numbers; any other spelling unchanged.

    >>> hexadecimal("Ġç"), hexadecimal("<0xE7>")
    ('⟨20 e7⟩', '<0xE7>')
    """
    if spelling.isascii() or not all(character in _BYTES for character in spelling):
        return spelling
    return f"⟨{' '.join(f'{_BYTES[character]:02x}' for character in spelling)}⟩"


def read_messages(value: Any) -> list[dict[str, str]]:
    """A list of {"role": …, "content": …}; raises RuleError for anything else."""
    if not isinstance(value, (list, tuple)) or not value:
        raise RuleError(expected("messages", value, "a list of messages"), '[{"role": "user", "content": "hello"}]')
    for message in value:
        plain = isinstance(message, dict) and set(message) == {"role", "content"}
        if not plain or message["role"] not in _ROLES or not isinstance(message["content"], str):
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

    def times(left: Any, right: Any) -> Any:
        if not all(isinstance(side, (int, float)) and abs(side) < 2**31 for side in (left, right)):
            raise TemplateError("it multiplies a text, or very large numbers")
        return left * right

    def refuse(reason: str, *_: Any) -> None:
        raise TemplateError(reason)

    options: Any = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
    environment = ImmutableSandboxedEnvironment(**options)
    environment.intercepted_binops = frozenset(("*", "**"))
    environment.binop_table |= {"*": times, "**": partial(refuse, "it raises to a power")}
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
