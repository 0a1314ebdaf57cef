"""Defines the number y that `ch.explain` explains: how likely an answer is, or how far it is ahead of another.

With P the probability of an answer after the text, the product of its tokens' probabilities, y is ln P − ln(1 − P), the
logit of P, which does not saturate when P is near 1 (Cohen-Wang et al. 2024, ContextCite). Against another answer, y is
ln P minus ln of the other's probability; for two single tokens that is the difference of their logits.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from clearhead.core.axes import Array
from clearhead.core.rule_values import is_whole, read_place
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError, expected, shown
from clearhead.explaining.texts import continued
from clearhead.models.protocol import Each, ForwardPass, LanguageModel, Token, Variant
from clearhead.models.tokenizer import Reading, check_unicode
from clearhead.spelling import cut
from clearhead.watching.pieces import words

REPLY, WORD = 24, 8  # tokens of a reply, and of a word, at most
_LIKELY, _CHECKED = 200, 6  # likeliest tokens that may be the rival, and how many of them are checked for fragments


class Target(NamedTuple):
    """One run whose logits give y, or a term of it.

    ids       the ids of the text and of all but the answer's last token
    answer    the ids of the answer's tokens
    against   the id of one other token, for the difference of two logits
    odds      y is ln P − ln(1 − P), not ln P
    sign      −1 for the other answer, whose ln P is subtracted
    """

    ids: list[int]
    answer: tuple[int, ...]
    against: int | None
    odds: bool
    sign: int = 1

    @property
    def rows(self) -> range:
        """The rows whose logits predict the answer's tokens."""
        return range(len(self.ids) - len(self.answer), len(self.ids))

    def odds_of_each(self, logits: Array) -> Array:
        """Return ln p − ln(1 − p) of each answer token, given the tokens before it, (rows,)."""
        rows, picked = np.arange(len(self.answer)), list(self.answer)
        others = np.array(logits)
        others[rows, picked] = -np.inf
        high = others.max(axis=-1)
        rest = np.exp(np.subtract(others, high[:, None], out=others), out=others).sum(axis=-1)
        return np.asarray(logits, np.float64)[rows, picked] - high - np.log(rest)

    def number(self, logits: Array, odds: Array) -> float:
        """Return y from its rows' logits and their `odds_of_each`: for a long answer much faster than `value`."""
        if self.against is not None:
            return self.sign * (float(logits[0, self.answer[0]]) - float(logits[0, self.against]))
        if self.odds and len(odds) == 1:
            return self.sign * float(odds[0])
        log_p = -float(np.logaddexp(0.0, -odds).sum())
        rest = max(-np.expm1(log_p), np.finfo(np.float64).tiny) if self.odds else 1.0
        return self.sign * float(log_p - np.log(rest))

    def value(self, logits: Array) -> tuple[float, Array]:
        """Return y and its derivative by the logits of its rows, (rows, vocabulary), in float64."""
        exact = np.asarray(logits, np.float64)
        number = self.number(exact, self.odds_of_each(exact))
        slopes, picked = np.zeros(exact.shape), list(self.answer)
        rows = np.arange(len(picked))
        slopes[rows, picked] = self.sign
        if self.against is not None:
            slopes[0, self.against] -= self.sign
            return number, slopes
        if self.odds and len(rows) == 1:  # a softmax over all other tokens avoids cancellation
            others = exact - exact[0, picked] + self.sign * number
            others[0, picked] = -np.inf
            return number, slopes - self.sign * np.exp(others)
        powers = np.exp(exact - exact.max(axis=-1, keepdims=True))
        slopes -= self.sign * powers / powers.sum(axis=-1, keepdims=True)
        rest = np.exp(-np.logaddexp(0.0, self.sign * number)) if self.odds else 1.0  # 1 − P
        return number, slopes / max(rest, np.finfo(np.float64).tiny)


class Question(NamedTuple):
    """What was asked: the runs that give y, and both answers' ids; the second has none if there is no other answer."""

    targets: list[Target]
    answer: tuple[int, ...]
    against: tuple[int, ...]


def said_by(
    model: LanguageModel, reading: Reading, run: ForwardPass, answer: Any, word: str | None, most: int, each: Each
) -> tuple[Reading, Any]:
    """Let the model answer in at most `most` tokens if no answer is given; return what is read, and the answer.

    With `word`, that word alone is the answer, and what comes before it is read as part of the text. Raises DtypeError
    or FileError if these are no texts, SelectionError if the answer does not have the word.
    """
    if not isinstance(word, str | None):
        raise DtypeError(expected("word", word, "a word of the answer"), 'word="Paris"')
    check_unicode("word", word or "")
    said = answer
    if not isinstance(said, str):
        ids = [token.id for token in reading.tokens] + ([] if said is None else [said])
        made = model.generate(ids, most or REPLY, each, ends=True, run=run)
        said = ("" if said is None else model.tokenizer.text(said)) + model.tokenizer.decoded(made)
    if word is None:
        return reading, said or None
    found = re.search(rf"\s*(?<!\w){re.escape(word.strip())}(?!\w)", said) or re.search(re.escape(word.strip()), said)
    if not found or not word.strip():
        raise SelectionError(f"word {shown(word)} is not in the answer.", f'take a word of: "{cut(said, 200)}"')
    before = said[: found.start()]
    return continued(model, reading, model.tokenizer.continuation(before) if before else []), found[0]


def read_answers(
    model: LanguageModel,
    tokens: list[Token],
    run: ForwardPass,
    answer: int | str | None,
    against: int | str | None,
) -> Question:
    """Read which answer to explain after a text's run; by default the first whole word that the model says.

    Raises RuleError for a model that predicts no next token, SelectionError if both answers are the same, ShapeError
    for an answer without tokens, or one that is too long.
    """
    if run.logits is None:
        raise RuleError(f"{model.name} predicts no next token, so there is no answer to explain.", "use a decoder.")
    ids, logits = [each.id for each in tokens], run.logits[-1]
    first = _ids(model, logits, "answer", answer) if answer is not None else whole_word(model, ids, run)
    second = () if against is None else _ids(model, logits, "against", against)
    if first == second:
        token = shown("".join(map(model.tokenizer.text, first)))
        raise SelectionError(f"answer and against are both {token}.", 'against=" London" names another answer.')
    model.tokenizer.fits(len(ids) + max(len(first), len(second)) - 1)
    if second and len(first) == len(second) == 1:
        return Question([Target(ids, first, second[0], odds=False)], first, second)
    targets = [Target([*ids, *first[:-1]], first, None, odds=not second)]
    if second:
        targets.append(Target([*ids, *second[:-1]], second, None, odds=False, sign=-1))
    return Question(targets, first, second)


def whole_word(model: LanguageModel, ids: list[int], run: ForwardPass) -> tuple[int, ...]:
    """Return the likeliest tokens after a run, up to the end of a word or number: " Montreal", not " Mont"."""
    made = [int(np.argmax(run.logits[-1]))]
    while len(made) < WORD:
        try:
            (after,) = model.generate([*ids, *made], 1, run=run)
        except ShapeError:  # the text fills the model's positions
            break
        texts, whole = model.tokenizer.texts([*made, after]), "\ufffd" not in model.tokenizer.encoder.decode(made)
        *_, last, new = words(texts)
        if whole and "".join(texts[:-1]).strip() and last != new:
            break
        made.append(after)
    return tuple(made)


def probability(value: float, tokens: int = 1) -> float:
    """Return P from ln P − ln(1 − P); for several tokens, the geometric mean of their probabilities."""
    return float(np.exp(-np.logaddexp(0.0, -value) / tokens))


def decides(value: float, change: float) -> bool:
    """Does this change of y take away a tenth of the answer's probability or more?"""
    return probability(value + change) <= 0.9 * probability(value)


def rival(model: LanguageModel, reading: Reading, run: ForwardPass, answer: int) -> int:
    """Choose the word to compare an answer with: a word of the text, or else the likeliest whole word.

    A word of the text counts if it is at least a hundredth as likely as the answer. Words like the answer (in capitals,
    numbers) come first: for " Paris", " London" rather than " the".
    """
    logits = np.asarray(run.logits[len(reading.tokens) - 1])
    said, floor = model.tokenizer.text(answer), logits[answer] - np.log(100)
    order = [i for i in np.argsort(-logits, kind="stable")[:_LIKELY].tolist() if i != answer]
    texts = {i: model.tokenizer.text(i) for i in order}
    starts = [i for i in order if texts[i][:1].isspace() or not said[:1].isspace()]  # begins a word if the answer does
    words_of = {i: texts[i].strip() for i in starts}
    begins = [i for i in starts if words_of[i].isalnum() and words_of[i].casefold() != said.strip().casefold()]
    kinds = {  # does it begin a word, and is it of letters, capitalised, or a number?
        i: (text[:1].isspace(), text.strip().isalpha(), text.strip()[:1].isupper(), text.strip().isdigit())
        for i, text in [*texts.items(), (answer, said)]
    }
    begins.sort(key=lambda i: kinds[i] != kinds[answer])  # a stable sort: the likeliest of each first
    standing = set(re.findall(r"\w+", reading.text))
    for i in begins:
        if logits[i] >= floor and words_of[i] in standing:
            return i
    ids = [token.id for token in reading.tokens]
    tried = begins[:_CHECKED]
    whole = (i for i, more in zip(tried, goes_on(model, len(ids), run, tried), strict=True) if not more)
    return next(whole, begins[0] if begins else order[0] if order else answer)


def goes_on(model: LanguageModel, place: int, run: ForwardPass, tokens: Sequence[int]) -> list[bool]:
    """For each token at this place, does the model continue its word, as after " Mont"? One pass for all tokens."""
    try:
        model.tokenizer.fits(place + 1, 1)
    except ShapeError:  # the text fills the model's positions
        return [False] * len(tokens)
    variants = [Variant(first=place, ids={place: token}) for token in tokens]
    after = (int(np.argmax(rows[0])) for rows in model.again(run, variants, range(place, place + 1)))
    texts = ([*map(model.tokenizer.text, pair)] for pair in zip(tokens, after, strict=True))
    return [words(pair) == [0, 0] for pair in texts]


def _ids(model: LanguageModel, logits: Array, name: str, wanted: Any) -> tuple[int, ...]:
    """Return the ids of an answer; a text without a leading space means the likelier of the two spellings."""
    if is_whole(wanted):
        return (read_place(name, wanted, len(logits)),)
    if not isinstance(wanted, str):
        raise DtypeError(expected(name, wanted, "a text, or the id of a token"), 'answer=" Paris"')
    check_unicode(name, wanted)
    text = wanted.replace("␣", " ")
    if not text.strip():
        raise ShapeError(f"{name} is empty: it has no token to explain.", 'answer=" Paris"')
    spellings = [text] if text[0].isspace() else [text, f" {text}"]
    made = [ids for spelling in spellings if (ids := tuple(model.tokenizer.continuation(spelling)))]
    if not made:
        raise ShapeError(f"{name} is {wanted!r}, and the model's tokenizer makes no token of it.", 'answer=" Paris"')
    return max(made, key=lambda ids: float(logits[ids[0]]))
