"""The number that `ch.explain` explains: how likely an answer is, or how far one answer is ahead of another.

With P the probability of an answer after the text, the product of its tokens' probabilities, it is ln P − ln(1 − P),
the logit of P, which does not saturate where P is near 1 (Cohen-Wang et al. 2024, ContextCite). Against another answer
it is ln P less ln of the other's; for two single tokens that is the difference of their logits.
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

_REPLY, WORD = 24, 8  # tokens of a reply, and of a word, at most
_LIKELY, _CHECKED = 200, 6  # likeliest tokens among which a rival is, and of these how many may be fragments


class Target(NamedTuple):
    """One run whose logits give (a part of) the number.

    ids       of the text and of all but the last token of the answer
    answer    the ids of the answer's tokens
    against   the id of one other token, for the difference of two logits
    odds      ln P − ln(1 − P) rather than ln P
    sign      −1 for the answer that the other is compared with
    """

    ids: list[int]
    answer: tuple[int, ...]
    against: int | None
    odds: bool
    sign: int = 1

    @property
    def rows(self) -> range:
        """The rows whose logits say the answer's tokens."""
        return range(len(self.ids) - len(self.answer), len(self.ids))

    def odds_of_each(self, logits: Array) -> Array:
        """The ln p − ln(1 − p) of each of the answer's tokens after those before it, (rows,)."""
        rows, picked = np.arange(len(self.answer)), list(self.answer)
        others = np.array(logits)
        others[rows, picked] = -np.inf
        high = others.max(axis=-1)
        rest = np.exp(others - high[:, None]).sum(axis=-1)
        return np.asarray(logits, np.float64)[rows, picked] - high - np.log(rest)

    def number(self, logits: Array, odds: Array) -> float:
        """The number alone, of the logits of its rows and their `odds_of_each`: of a long answer much quicker."""
        if self.against is not None:
            return self.sign * (float(logits[0, self.answer[0]]) - float(logits[0, self.against]))
        if self.odds and len(odds) == 1:
            return self.sign * float(odds[0])
        log_p = -float(np.logaddexp(0.0, -odds).sum())
        rest = max(-np.expm1(log_p), np.finfo(np.float64).tiny) if self.odds else 1.0
        return self.sign * float(log_p - np.log(rest))

    def value(self, logits: Array) -> tuple[float, Array]:
        """The number, and its derivative by the logits of its rows, (rows, vocabulary), in float64."""
        exact = np.asarray(logits, np.float64)
        number = self.number(exact, self.odds_of_each(exact))
        slopes, picked = np.zeros(exact.shape), list(self.answer)
        rows = np.arange(len(picked))
        slopes[rows, picked] = self.sign
        if self.against is not None:
            slopes[0, self.against] -= self.sign
            return number, slopes
        if self.odds and len(rows) == 1:  # the softmax of all others: no difference of near numbers
            others = exact - exact[0, picked] + self.sign * number
            others[0, picked] = -np.inf
            return number, slopes - self.sign * np.exp(others)
        powers = np.exp(exact - exact.max(axis=-1, keepdims=True))
        slopes -= self.sign * powers / powers.sum(axis=-1, keepdims=True)
        rest = np.exp(-np.logaddexp(0.0, self.sign * number)) if self.odds else 1.0  # 1 − P
        return number, slopes / max(rest, np.finfo(np.float64).tiny)


class Question(NamedTuple):
    """What was asked: the runs that give the number, and both answers' ids; no ids where there is no other."""

    targets: list[Target]
    answer: tuple[int, ...]
    against: tuple[int, ...]


def said_by(
    model: LanguageModel, reading: Reading, run: ForwardPass, answer: Any, word: str | None, most: int, each: Each
) -> tuple[Reading, Any]:
    """Let the model say its answer, of at most `most` tokens, where none is given; return what is read, and the answer.

    With `word` that word alone is the answer, and what was said before it is read too. Raises DtypeError, FileError for
    what is no text, SelectionError for a word that was not said.
    """
    if not isinstance(word, str | None):
        raise DtypeError(expected("word", word, "a word of the answer"), 'word="Paris"')
    check_unicode("word", word or "")
    said = answer
    if not isinstance(said, str):
        ids = [token.id for token in reading.tokens] + ([] if said is None else [said])
        made = model.generate(ids, most or _REPLY, each, ends=True, run=run)
        said = ("" if said is None else model.tokenizer.text(said)) + model.tokenizer.decoded(made)
    if word is None:
        return reading, said or None
    found = re.search(rf"\s*(?<!\w){re.escape(word.strip())}(?!\w)", said) or re.search(re.escape(word.strip()), said)
    if not found or not word.strip():
        raise SelectionError(f"word {shown(word)} is not in the answer.", f'the answer is "{cut(said, 200)}".')
    before = said[: found.start()]
    return continued(model, reading, model.tokenizer.continuation(before) if before else []), found[0]


def read_answers(
    model: LanguageModel,
    tokens: list[Token],
    run: ForwardPass,
    answer: int | str | None,
    against: int | str | None,
) -> Question:
    """Read what to explain after a text's run; where no answer is given, the first whole word that the model says.

    Raises RuleError for a model that says no next token, SelectionError where both answers are the same, ShapeError for
    an answer without tokens, or too long.
    """
    if run.logits is None:
        raise RuleError(f"{model.name} says no next token, so there is no answer to explain.", "a decoder has one.")
    ids, logits = [each.id for each in tokens], run.logits[-1]
    first = _ids(model, logits, "answer", answer) if answer is not None else whole_word(model, ids, run)
    second = () if against is None else _ids(model, logits, "against", against)
    if first == second:
        token = shown("".join(map(model.tokenizer.text, first)))
        raise SelectionError(f"answer and against are both {token}: their difference is always 0.")
    model.tokenizer.fits(len(ids) + max(len(first), len(second)) - 1)
    if second and len(first) == len(second) == 1:
        return Question([Target(ids, first, second[0], odds=False)], first, second)
    targets = [Target([*ids, *first[:-1]], first, None, odds=not second)]
    if second:
        targets.append(Target([*ids, *second[:-1]], second, None, odds=False, sign=-1))
    return Question(targets, first, second)


def whole_word(model: LanguageModel, ids: list[int], run: ForwardPass) -> tuple[int, ...]:
    """Return the likeliest tokens after a run up to the end of the first word or number: " Montreal" for " Mont"."""
    made = [int(np.argmax(run.logits[-1]))]
    while len(made) < WORD:
        try:
            (after,) = model.generate([*ids, *made], 1, run=run)
        except ShapeError:  # the text fills the model's positions
            break
        texts = [*map(model.tokenizer.text, made), model.tokenizer.text(after)]
        *_, last, new = words(texts)
        if "".join(texts[:-1]).strip() and last != new:
            break
        made.append(after)
    return tuple(made)


def probability(value: float, tokens: int = 1) -> float:
    """P of ln P − ln(1 − P); of an answer of several tokens their geometric mean."""
    return float(np.exp(-np.logaddexp(0.0, -value) / tokens))


def decides(value: float, change: float) -> bool:
    """Does y changing by that take a tenth of the answer's probability or more?"""
    return probability(value + change) <= 0.9 * probability(value)


def rival(model: LanguageModel, reading: Reading, run: ForwardPass, answer: int) -> int:
    """Return the whole word to compare an answer with: a word of the text, or the likeliest that is no fragment.

    A word of the text counts where its probability is at least a hundredth of the answer's. Words of the answer's kind
    (capitals, numbers) come first: " London" for " Paris" rather than " the".
    """
    logits = np.asarray(run.logits[len(reading.tokens) - 1])
    said, floor = model.tokenizer.text(answer), logits[answer] - np.log(100)
    order = [i for i in np.argsort(-logits, kind="stable")[:_LIKELY].tolist() if i != answer]
    texts = {i: model.tokenizer.text(i) for i in order}
    starts = [i for i in order if texts[i][:1].isspace() or not said[:1].isspace()]  # a word where the answer does
    words_of = {i: texts[i].strip() for i in starts}
    begins = [i for i in starts if words_of[i].isalnum() and words_of[i].casefold() != said.strip().casefold()]
    kinds = {  # does it begin a word, and is it one of letters, in capitals, or a number?
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
    """Does the model go on within the word that each token begins at that place, as after " Mont"? One pass for all."""
    try:
        model.tokenizer.fits(place + 1, 1)
    except ShapeError:  # the text fills the model's positions
        return [False] * len(tokens)
    variants = [Variant(first=place, ids={place: token}) for token in tokens]
    after = (int(np.argmax(rows[0])) for rows in model.again(run, variants, range(place, place + 1)))
    texts = ([*map(model.tokenizer.text, pair)] for pair in zip(tokens, after, strict=True))
    return [words(pair) == [0, 0] for pair in texts]


def _ids(model: LanguageModel, logits: Array, name: str, wanted: Any) -> tuple[int, ...]:
    """The ids of an answer's tokens; without a leading space a text stands for the likelier of both spellings."""
    if is_whole(wanted):
        return (read_place(name, wanted, len(logits)),)
    if not isinstance(wanted, str):
        raise DtypeError(expected(name, wanted, "a text, or the id of a token"), 'answer=" Paris"')
    check_unicode(name, wanted)
    text = wanted.replace("␣", " ")
    if not text.strip():
        raise ShapeError(f"{name} is empty: there is no token to explain.", 'answer=" Paris"')
    spellings = [text] if text[0].isspace() else [text, f" {text}"]
    made = [ids for spelling in spellings if (ids := tuple(model.tokenizer.continuation(spelling)))]
    if not made:
        raise ShapeError(f"{name} is {wanted!r}, of which the model's tokenizer makes no token.", "name another text.")
    return max(made, key=lambda ids: float(logits[ids[0]]))
