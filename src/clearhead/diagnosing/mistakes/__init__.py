"""The catalogue: every mistake that diagnose knows. Adding one is adding one entry to one of these tuples."""

from clearhead.diagnosing.mistakes.arrays import ARRAYS
from clearhead.diagnosing.mistakes.base import Mistake as Mistake
from clearhead.diagnosing.mistakes.biases import BIASES
from clearhead.diagnosing.mistakes.blocks import BLOCKS
from clearhead.diagnosing.mistakes.heads import HEADS
from clearhead.diagnosing.mistakes.kernels import KERNELS
from clearhead.diagnosing.mistakes.lengths import LENGTHS
from clearhead.diagnosing.mistakes.masks import MASKS
from clearhead.diagnosing.mistakes.rotary import ROTARY
from clearhead.diagnosing.mistakes.scores import SCORES
from clearhead.diagnosing.mistakes.softmax import SOFTMAX

MISTAKES: tuple[Mistake, ...] = (
    *SCORES,
    *BIASES,
    *ARRAYS,
    *HEADS,
    *ROTARY,
    *MASKS,
    *LENGTHS,
    *SOFTMAX,
    *BLOCKS,
    *KERNELS,
)
