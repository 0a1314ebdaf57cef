"""The catalogue: every mistake that diagnose knows. Adding one is adding one entry to one of these tuples."""

from clearhead.diagnosing.mistakes.base import Mistake as Mistake
from clearhead.diagnosing.mistakes.scores import SCORES, SOFTMAX

MISTAKES: tuple[Mistake, ...] = (*SCORES, *SOFTMAX)
