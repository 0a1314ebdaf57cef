"""The texts that a model runs over: where each begins, its length and its words, by stack of layers."""

from dataclasses import dataclass, field
from typing import Any

from clearhead.errors import DtypeError
from clearhead.watching.naming import ModulePath, text_of
from clearhead.watching.pieces import pieces_of
from clearhead.watching.places import Text


@dataclass(eq=False)
class Sequence:
    """A text while the model runs over it: the forward pass it began in, and the positions of its latest queries."""

    text: Text
    began: int
    queries: range
    sums: dict[Any, dict[int, Any]] = field(default_factory=dict)  # what each layer remembers of it


class Texts:
    """The latest text of each stack of layers. A text begins with its first token, or where the block begins."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._pass = 0
        self._ids: Any = None  # of this pass's sequences, (batch, length)
        self._source: Any = None  # of the latest encoder's
        self._known: dict[tuple[str, str], Sequence] = {}  # by stack, and what it is there

    def begin_pass(self) -> None:
        """An outermost forward pass begins."""
        self._pass += 1
        self._ids = None

    def take_tokens(self, ids: Any, source: Any) -> None:
        """The ids that it is given, and those of its encoder; None where there are none."""
        self._ids = ids
        self._source = self._source if source is None else source

    def of(self, path: str, queries: range, keys: range) -> tuple[Sequence, Text]:
        """The sequence of a call's queries, and the text of its keys. `path` is that of the attention module."""
        stack, _, cross = ModulePath.of(path)
        begins = queries.start == 0
        if not cross:
            sequence = self._at(stack, "own", queries, keys.stop, begins=begins)
            return sequence, sequence.text
        known = self._known.get((stack, "own"))
        if known is None or len(known.queries) != len(queries):  # they attend to the other sequence only
            known = self._at(path, "queries", queries, queries.stop, begins=begins)
        return known, self._at(stack, "keys", range(0), keys.stop, begins=known.began == self._pass).text

    def start(self, path: str, queries: int) -> int:
        """The position of so many queries of cross-attention: that of the decoder's own in this pass."""
        known = self._known.get((ModulePath.of(path).stack, "own"))
        return known.queries.start if known is not None and len(known.queries) == queries else 0

    def _at(self, stack: str, what: str, queries: range, length: int, *, begins: bool) -> Sequence:
        known = self._known.get((stack, what))
        if known is None or (begins and (known.began, known.text.length) != (self._pass, length)):
            known = Sequence(self._text(stack, what, length, whole=begins), self._pass, queries)
            self._known[stack, what] = known
        known.queries = queries
        return known

    def _text(self, stack: str, what: str, length: int, *, whole: bool) -> Text:
        if self.tokenizer is None:
            return Text(length)
        side = "source" if what == "keys" else text_of(stack, has_source=self._source is not None)
        if not whole or not side:
            return Text(length, why="the text before the block is not known" if not whole else "this is no text")
        ids = self._source if side == "source" else self._ids
        if ids is None:
            return Text(length, why="the model was not given the ids of its tokens")
        if ids.shape[1] != length:
            return Text(length, why=f"the model was given {ids.shape[1]} ids for {length} positions")
        return Text(length, [pieces_of(row, self.tokenizer.decode) for row in ids.tolist()])


def check_tokenizer(tokenizer: Any) -> None:
    """Raise DtypeError for something that makes no text of ids; None is no tokenizer."""
    decodes = callable(getattr(tokenizer, "decode", None)) and not isinstance(tokenizer, (bytes, bytearray))
    if tokenizer is not None and not decodes:
        raise DtypeError(
            f"tokenizer is a {type(tokenizer).__name__}: expected something with decode(list of ids).",
            "tokenizer=transformers.AutoTokenizer.from_pretrained(…)",
        )
