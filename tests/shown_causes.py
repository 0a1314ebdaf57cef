"""Is what `ch.explain` shows of a text what happens in other code? The first three parts, and each conclusion.

`logits_of(ids, hidden, weigh, off)` is the other code: the logits (tokens, vocabulary), where no later token sees the
hidden ones, `weigh(layer, weights)` changes weights (heads, queries, keys), and of `off`, a layer, a head and a row,
the head gives 0 from that row on.
"""

import re

import numpy as np
import pytest

from clearhead.explaining.why_words import conclusion, head_lines, listed, part_lines
from clearhead.spelling import bare
from clearhead.watching.pieces import words


def odds(logits, tokens):
    """ln P − ln(1 − P) of the tokens, each of the logits of a row."""
    exact = np.asarray(logits, np.float64)
    log = sum(row[token] - np.logaddexp.reduce(row) for row, token in zip(exact, tokens, strict=True))
    return float(log - np.log(-np.expm1(log)))


def share(logits, tokens):
    """The probability of the tokens."""
    return float(1 / (1 + np.exp(-odds(logits, tokens))))


class Truth:
    """One explanation, and every run that it speaks of, made again by other code."""

    def __init__(self, seen, logits_of):
        self.seen, self.answer = seen, list(seen.again.based[0].target.answer)
        self.ids, self.first = [token.id for token in seen.tokens] + self.answer[:-1], len(seen.tokens) - 1
        self.logits_of = lambda *args, **named: logits_of(*args, **named)[self.first :]
        self.base = self.logits_of(self.ids)
        self.runs = [self.without(part) for part in seen.parts]

    def without(self, *parts):
        """The logits without these parts; the first token is replaced."""
        tokens = sorted(token for part in parts for token in part.tokens)
        read = [self.seen.model.tokenizer.neutral, *self.ids[1:]] if 0 in tokens else self.ids
        return self.logits_of(read, [token for token in tokens if token])

    @property
    def changes(self):
        """What hiding each part changes the answer's log-odds by."""
        return np.array([odds(run, self.answer) - odds(self.base, self.answer) for run in self.runs])

    def first_three_are_right(self):
        """Are the parts in the first three rows those whose hiding changes the answer most?"""
        shown = [self.seen.parts.index(part) for part, within in listed(self.seen, 3) if not within]
        return {*shown} == {*np.argsort(-np.abs(self.changes), kind="stable")[:3].tolist()}

    def check_sentences(self):
        """Each sentence of the screen, word by word and number by number."""
        for said, part in zip(part_lines(self.seen, "en", 5), self.seen.ranked[:5], strict=False):
            self._check_line(said, self.runs[self.seen.parts.index(part)])
        for said in head_lines(self.seen, "en"):
            head = re.match(r"With head (\d+)\.(\d+)", said)
            self._check_line(said, self._off(int(head[1]), int(head[2])))
        first, *middle, last = conclusion(self.seen, "en")
        self._check_needs(first.removeprefix("So: "))
        for sentence in middle:
            self._check_pair(sentence)
        self._check_head(last)

    def _off(self, layer, head):
        return self.logits_of(self.ids, off=(layer, head, self.first))

    def _is(self, said, logits, token=None):
        true = share(logits, self.answer) if token is None else share(logits[:1], [token])
        digits, _, power = said[:-1].partition("e")
        unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))  # of the last digit that is printed
        assert float(said[:-1]) == pytest.approx(100 * true, abs=0.51 * unit, rel=2e-3), said

    def _check_line(self, said, run):
        form = r".*: “.*” (falls to|rises to|stays at) (\S+%)(?:, and “(.*)” leads with (\S+%))?\."
        found = re.fullmatch(form, said)
        assert found, said
        self._is(found[2], run)
        change = share(run, self.answer) - share(self.base, self.answer)
        assert (found[1] == "falls to") * change <= 0 <= change * (found[1] == "rises to") + (change < 0), said
        if found[3]:
            likeliest = int(np.argmax(run[0]))
            assert likeliest != self.answer[0]
            ids = [token.id for token in self.seen.tokens]
            after = int(np.argmax(self.logits_of([*ids, likeliest])[-1]))
            texts = [*map(self.seen.model.tokenizer.text, (likeliest, after))]
            assert found[3] == bare(texts[0]) + "…" * (words(texts) == [0, 0])
            self._is(found[4], run, likeliest)

    def _check_needs(self, said):
        kept = np.array([share(run, self.answer) for run in self.runs]) / share(self.base, self.answer)
        sure, most = int((kept < 0.499).sum()), int((kept < 0.501).sum())
        needed = re.fullmatch(
            r"“.*” needs (.*?)(?: and (\d+) more)?: without (?:it|any one of them), less than half .*", said
        )
        if needed:
            names = re.findall(r"“(.*?)”", needed[1])
            assert sure <= len(names) + int(needed[2] or 0) <= most, said
            least = [bare(self.seen.parts[place].text) for place in np.flatnonzero(kept < 0.501)]
            assert {*names} <= {*least}, said
            return
        assert not sure, said
        if said.startswith("hiding a single part"):
            assert (self.changes >= -1e-3).all(), said
            return
        little = re.fullmatch(r"no single part decides: .*, “.*” still has (\S+) of (\S+)\.", said)
        assert little, said
        self._is(little[1], self.runs[int(self.changes.argmin())])
        self._is(little[2], self.base)

    def _check_pair(self, said):
        pair = self.seen.pairs[0]
        either = re.fullmatch(r"Either .* or .* is enough: without both, “.*” falls to (\S+)\.", said)
        assert either, said
        self._is(either[1], self.without(pair.first, pair.second))

    def _check_head(self, said):
        carried = re.fullmatch(r"Head (\d+)\.(\d+) carries it\.", said)
        if carried:
            off = self._off(int(carried[1]), int(carried[2]))
            assert share(off, self.answer) < 0.91 * share(self.base, self.answer)
            for number in (odds, share):  # at least a tenth of what the best part takes
                takes = number(self.base, self.answer) - number(off, self.answer)
                best = max(number(self.base, self.answer) - number(run, self.answer) for run in self.runs)
                assert takes >= 0.099 * best, said
            return
        assert re.fullmatch(r"No single head carries it(?:: \d+\.\d+ is needed by any text)?\.", said), said


def check(why, texts, logits_of):
    """The first three of at least 19 in 20 prompts, and every sentence of all."""
    right = []
    for text in texts:
        truth = Truth(why(text), logits_of)
        truth.check_sentences()
        right.append(truth.first_three_are_right())
    assert 20 * sum(right) >= 19 * len(texts), [text for text, one in zip(texts, right, strict=True) if not one]
