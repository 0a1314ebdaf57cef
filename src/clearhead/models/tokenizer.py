"""A model's tokenizer turns texts and chats into tokens, and tokens into text, whether NumPy or PyTorch runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from clearhead.errors import FileError, RuleError, ShapeError
from clearhead.models.chats import Span, read_messages, rendered
from clearhead.models.protocol import Token, first_letter
from clearhead.watching.pieces import pieces_of

_BORDERS = "<|endoftext|>", "<s>"  # tokens that say least at the start of a text
_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's vocabulary spells as themselves
_BYTES = {chr(byte): byte for byte in _VISIBLE} | {
    chr(256 + place): byte for place, byte in enumerate(byte for byte in range(256) if byte not in _VISIBLE)
}


class Reading(NamedTuple):
    """What a model reads: a text, its tokens, and for a chat where each message's content stands.

    turns   each message's span, (0, 0) if the template leaves it out
    dated   does the chat's template write today's date?
    """

    text: str
    tokens: list[Token]
    turns: Sequence[Span] = ()
    dated: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Tokenizer:
    """Splits a model's texts into tokens: a tokenizer of the library `tokenizers`, and facts from the model's files.

    name         the model's name, for errors
    encoder      a tokenizers.Tokenizer
    positions    how many tokens a text may have; None: any number
    vocabulary   how many different tokens the model knows
    template     the chat template, in Jinja; None: the model has none
    words        the special tokens that a template may write, by their names there, such as bos_token
    ends         the ids of the tokens that end a reply
    """

    name: str
    encoder: Any
    positions: int | None
    vocabulary: int
    template: str | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()

    def tokens(self, text: str) -> list[Token]:
        """Split `text` into tokens. Raises ShapeError if it is empty or longer than the model's positions."""
        check_unicode("text", text)
        return self._tokens(self.encoder.encode(text), text)

    def chat(self, messages: Any) -> Reading:
        """Return the text that the model reads for messages, and its tokens; tokens of the template are marked.

        messages   a list of {"role": "system", "user" or "assistant", "content": a string}
        Raises RuleError for a model without a template or malformed messages, FileError for a broken template.
        """
        read = read_messages(messages)
        if self.template is None:
            raise RuleError(f"{self.name} has no chat template.", "give it a plain text, or use a chat model: smollm2.")
        for message in read:
            check_unicode("text", message["content"])
        text, turns, dated = rendered(self.template, read, self.name, self.words)
        tokens = self._tokens(self.encoder.encode(text, add_special_tokens=False), text)
        inside = [any(start <= first_letter(token, text) < stop for start, stop in turns) for token in tokens]
        marked = [token._replace(template=not one) for token, one in zip(tokens, inside, strict=True)]
        return Reading(text, marked if any(inside) else tokens, turns, dated)

    def fits(self, tokens: int, reply: int = 0) -> None:
        """Raise ShapeError if tokens and reply together exceed the model's positions."""
        if self.positions is not None and tokens + reply > self.positions:
            more = f" and the reply {reply}" if reply else ""
            raise ShapeError(
                f"the text has {tokens} tokens{more}, but the model has {self.positions} positions.",
                "shorten the text, or choose a model with more positions: "
                "openai-community/gpt2 has 1,024, HuggingFaceTB/SmolLM2-135M 8,192, Qwen/Qwen3-0.6B 40,960.",
            )

    def text(self, token: int) -> str:
        """Return a token's text; bytes of a split character in hexadecimal, ⟨e7⟩; an id without a word as ⟨id 97⟩."""
        spelling = self.encoder.id_to_token(token)
        if spelling is None:  # embeddings may have more rows than there are words
            return f"⟨id {token}⟩"
        if "▁" in spelling:  # SentencePiece's space, which decoding one token may drop
            return str(spelling).replace("▁", " ")
        decoded: str = self.encoder.decode([token], skip_special_tokens=False)
        return decoded if decoded and "\ufffd" not in decoded else hexadecimal(str(spelling))

    def continuation(self, text: str) -> list[int]:
        """Return the ids of a text that continues another, without special tokens."""
        ids: list[int] = self.encoder.encode(text, add_special_tokens=False).ids
        return ids

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return consecutive tokens' texts; of those that make one character, the last has it and the others ""."""
        decode = partial(self.encoder.decode, skip_special_tokens=False)
        parts = pieces_of(ids, decode)
        whole = "\ufffd" not in "".join(parts)
        return [part if whole and "\ufffd" in decode([i]) else self.text(i) for i, part in zip(ids, parts, strict=True)]

    def decoded(self, ids: list[int]) -> str:
        """Return the text of consecutive tokens, without special tokens and a last character that is incomplete."""
        return str(self.encoder.decode(ids)).rstrip("\ufffd")

    @property
    def neutral(self) -> int:
        """The token that means least at the start of a text: beginning of text, end of document, or a new line.

        A token that the chat template writes is left out: it begins messages, not texts.
        """
        words = (self.words.get("bos_token"), *_BORDERS)
        borders = (self.encoder.token_to_id(word) for word in words if word and word not in (self.template or ""))
        border = next((number for number in borders if number is not None), None)
        return (self.continuation("\n") or [0])[-1] if border is None else border

    def _tokens(self, encoded: Any, text: str) -> list[Token]:
        if not encoded.ids or not text:
            raise ShapeError("the text is empty: there is no token to explain.", 'a text such as "mary had a".')
        if (top := max(encoded.ids)) >= self.vocabulary:
            raise FileError(f"the tokenizer gives id {top}, but the model's vocabulary has {self.vocabulary} tokens.")
        self.fits(len(encoded.ids))
        return [Token(i, self.text(i), *span) for i, span in zip(encoded.ids, encoded.offsets, strict=True)]


def check_unicode(name: str, text: str) -> None:
    """Raise FileError for text that is not Unicode: a shell may pass bytes of another encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) - 0xDC00
        kind = f"byte {byte:#04x}" if 0x80 <= byte <= 0xFF else "a lone surrogate"
        raise FileError(f"{name} is not UTF-8: character {error.start} is {kind}.", "save it as UTF-8.") from None


def hexadecimal(spelling: str) -> str:
    """Write a byte-level vocabulary's spelling of bytes in hexadecimal; return any other spelling unchanged.

    >>> hexadecimal("Ġç"), hexadecimal("<0xE7>")
    ('⟨20 e7⟩', '<0xE7>')
    """
    if spelling.isascii() or not all(character in _BYTES for character in spelling):
        return spelling
    return f"⟨{' '.join(f'{_BYTES[character]:02x}' for character in spelling)}⟩"
