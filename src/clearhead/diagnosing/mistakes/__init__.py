"""The catalogue: every mistake that diagnose knows. Adding one is adding one entry to one of these tuples."""

from clearhead.diagnosing.mistakes.base import Mistake as Mistake
from clearhead.diagnosing.mistakes.heads import HEADS
from clearhead.diagnosing.mistakes.kernels import KERNELS
from clearhead.diagnosing.mistakes.masks import MASKS
from clearhead.diagnosing.mistakes.scores import SCORES
from clearhead.diagnosing.mistakes.softmax import SOFTMAX

MISTAKES: tuple[Mistake, ...] = (*SCORES, *HEADS, *MASKS, *SOFTMAX, *KERNELS)
