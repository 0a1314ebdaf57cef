"""A model's tokenizer: texts and chats as tokens, tokens as text. One for decoders in NumPy and for Transformers'."""

from dataclasses import dataclass
from typing import Any

from clearhead.errors import FileError, RuleError, ShapeError
from clearhead.models.chat import marked, read_messages, rendered
from clearhead.models.protocol import Token, hexadecimal

_BORDERS = "<|endoftext|>", "<s>"  # tokens that say least at the start of a text


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
        return self._fitting(self._tokens(self.encoder.encode(text), text))

    def chat(self, messages: Any) -> tuple[str, list[Token]]:
        """The text that the model is given for messages, and its tokens; those of the template are marked.

        messages   a list of {"role": "system", "user" or "assistant", "content": a text}
        Raises RuleError for a model without a template and for what is no message, FileError for a broken template.
        """
        read = read_messages(messages)
        if self.template is None:
            raise RuleError(f"{self.name} has no chat template.", "give it a text.")
        text = rendered(self.template, read, self.name, bos_token=self.begin, eos_token=self.end)
        cut = self._tokens(self.encoder.encode(text, add_special_tokens=False), text)
        return text, self._fitting(marked(cut, text, read))

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

    def _fitting(self, cut: list[Token]) -> list[Token]:
        self.fits(len(cut))
        return cut

    def _tokens(self, encoded: Any, text: str) -> list[Token]:
        if not encoded.ids or not text:
            raise ShapeError(
                "the text is empty: there is no token to explain.", 'clearhead explain "humpty dumpty sat on"'
            )
        if (top := max(encoded.ids)) >= self.vocabulary:
            raise FileError(f"the tokenizer gives id {top} but the model's vocabulary has {self.vocabulary} tokens.")
        return [Token(i, self.text(i), *span) for i, span in zip(encoded.ids, encoded.offsets, strict=True)]
