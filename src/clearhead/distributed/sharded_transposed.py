"""The transpose of a matrix of a sharded sequence."""

from typing import Any

from torch import Tensor

from clearhead.ops.transposed import M_co, TransposedMatrix


class ShardedTransposedMatrix(TransposedMatrix[M_co]):
    """The transpose of a sharded matrix: products from all queries to own keys, and weights or effects by index."""

    def __getitem__(self, key: Any) -> Tensor:
        """Exact weights or effects: those of the matrix with its last two axes swapped; all ranks give the same index.

        Errors as in the matrix, which reads the index, so that a wrong one is told to all ranks.
        """
        found: Tensor = self._weights(key, True)
        return found
