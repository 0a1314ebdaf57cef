"""Is what `ch.explain` shows of a text what happens in other code? The first three parts, and each conclusion.

`logits_of(ids, hidden, weigh, off)` is the other code: the logits (tokens, vocabulary), where no later token sees the
hidden ones, `weigh(layer, weights)` changes weights (heads, queries, keys), and of `off`, a layer, a head and a row,
the head gives 0 from that row on.
"""

import re

import numpy as np
import pytest

from clearhead.explaining.why_words import conclusion, listed


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
        self.seen, self.answer = seen, list(seen.based[0].target.answer)
        self.ids, self.first = [token.id for token in seen.tokens] + self.answer[:-1], len(seen.tokens) - 1
        self.logits_of = lambda *args, **named: logits_of(*args, **named)[self.first :]
        self.base = self.logits_of(self.ids)
        self.runs = [self.without(part) for part in seen.parts]

    def without(self, *parts):
        """The logits without these parts; the first token is replaced."""
        tokens = sorted(token for part in parts for token in part.tokens)
        read = [self.seen.model.neutral, *self.ids[1:]] if 0 in tokens else self.ids
        return self.logits_of(read, [token for token in tokens if token])

    @property
    def changes(self):
        """What hiding each part changes the answer's log-odds by."""
        return np.array([odds(run, self.answer) - odds(self.base, self.answer) for run in self.runs])

    def first_three_are_right(self):
        """Are the parts in the first three rows those whose hiding changes the answer most?"""
        shown = [self.seen.parts.index(part) for part, within in listed(self.seen, 3) if not within]
        return {*shown} == {*np.argsort(-np.abs(self.changes), kind="stable")[:3].tolist()}

    def check_conclusion(self):
        """Each sentence, word by word and number by number."""
        first, *middle, last = conclusion(self.seen, "en")
        self._check_part(first.removeprefix("So: "))
        for sentence in middle:
            self._check_pair(sentence)
        self._check_head(last)

    def _is(self, said, logits, token=None):
        true = share(logits, self.answer) if token is None else share(logits[:1], [token])
        digits, _, power = said[:-1].partition("e")
        unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))  # of the last digit that is printed
        assert float(said[:-1]) == pytest.approx(100 * true, abs=0.51 * unit, rel=2e-3), said

    def _check_part(self, said):
        if said.startswith("hiding any one part"):
            assert (self.changes >= -1e-3).all(), said
            return
        place = int(self.changes.argmin())
        part, run = self.seen.parts[place], self.runs[place]
        name = re.escape(part.text.strip() or "␣")
        without = f"with .* in place of “{name}”" if part.replaced else f"without “{name}”"
        little = re.fullmatch(rf"no single part decides: {without}, (.*) still has (\S+) of (\S+)\.", said)
        falls = re.fullmatch(rf"{without}, (.*) falls from (\S+) to (\S+%)(?:, and (.*) leads with (\S+))?\.", said)
        assert little or falls, (said, without)
        if little:
            self._is(little[2], run)
            self._is(little[3], self.base)
            assert share(run, self.answer) > 0.89 * share(self.base, self.answer)
            return
        assert share(run, self.answer) < 0.91 * share(self.base, self.answer)
        self._is(falls[2], self.base)
        self._is(falls[3], run)
        likeliest = int(np.argmax(run[0]))
        assert bool(falls[4]) == (likeliest != self.answer[0]), said
        if falls[4]:
            self._is(falls[5], run, likeliest)

    def _check_pair(self, said):
        pair = self.seen.pairs[0]
        either = re.fullmatch(
            r"Either of these is enough: “.*” or “.*”\. Without the first .* has (\S+), without the second (\S+), "
            r"without both (\S+)\.",
            said,
        )
        assert either, said
        for number, parts in zip(
            either.groups(), ([pair.first], [pair.second], [pair.first, pair.second]), strict=True
        ):
            self._is(number, self.without(*parts))

    def _check_head(self, said):
        carried = re.fullmatch(
            r"Head (\d+)\.(\d+) carries it(?: most: with it off, .* falls to (\S+)|"
            r", .* ← .*: without this edge .* has (\S+), with the head off (\S+))\.",
            said,
        )
        if carried:
            layer, head = int(carried[1]), int(carried[2])
            off = self.logits_of(self.ids, off=(layer, head, self.first))
            self._is(carried[3] or carried[5], off)
            assert share(off, self.answer) < 0.91 * share(self.base, self.answer)
            for number in (odds, share):  # at least a tenth of what the best part takes
                takes = number(self.base, self.answer) - number(off, self.answer)
                best = max(number(self.base, self.answer) - number(run, self.answer) for run in self.runs)
                assert takes >= 0.099 * best, said
            if carried[4]:
                self._is(carried[4], self.logits_of(self.ids, weigh=self._moved(layer, head)))
            return
        none = re.fullmatch(
            r"No single head carries it: (?:with the strongest, (\d+)\.(\d+), off, .* still has (\S+)|"
            r"(\d+)\.(\d+) is needed by any text\. With it off, .* has (\S+)|with any one off, .*)\.",
            said,
        )
        assert none, said
        if none[3] or none[6]:
            place = int(none[1] or none[4]), int(none[2] or none[5])
            self._is(none[3] or none[6], self.logits_of(self.ids, off=(*place, self.first)))

    def _moved(self, layer, head):
        """Move the weight of a head's strongest edge to the first token, or to all others where few heads rest."""
        edge = next(one.edge for one in self.seen.heads if one[:2] == (layer, head))

        def weigh(number, weights):
            if number == layer:
                row = weights[head, edge.query]
                moved, row[edge.key] = float(row[edge.key]), 0.0
                if self.seen.sink:
                    row[0] += moved
                else:
                    row /= row.sum()
            return weights

        return weigh


def check(why, texts, logits_of):
    """The first three of at least 19 of 20 prompts, and every sentence of all."""
    right = []
    for text in texts:
        truth = Truth(why(text), logits_of)
        truth.check_conclusion()
        right.append(truth.first_three_are_right())
    assert len(texts) == 20
    assert sum(right) >= 19, [text for text, one in zip(texts, right, strict=True) if not one]
