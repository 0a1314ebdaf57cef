"""What `rollout` and `relevance` give: an array (batch, tokens) that a notebook shows with its tokens."""

from functools import cache
from typing import Any

import numpy as np

from clearhead.core.arrays import as_host_array
from clearhead.digits import significant
from clearhead.spelling import spelled
from clearhead.tables import Table, Tabular
from clearhead.words import Language, say

_MOST = 10


class _Shares(Tabular):
    names: Any = ()  # of each text's tokens, where they are known

    def _tables(self, language: Language) -> list[Table]:
        values = as_host_array(self, "shares")[0].astype(np.float64)
        values = values.reshape(-1, values.shape[-1] if values.ndim else 1)
        order = np.argsort(-values, axis=None, kind="stable")[:_MOST]
        names = self.names if len(self.names) == len(values) else [()] * len(values)
        rows = []
        for batch, place in np.transpose(np.unravel_index(order, values.shape)).tolist():
            known = f" {spelled(str(names[batch][place]))}" if len(names[batch]) == values.shape[1] else ""
            rows.append((str(batch), f"{place}{known}", significant(float(values[batch, place]), 4)))
        columns = [say(language, f"column {name}") for name in ("batch", "token", "share")]
        return [Table(say(language, "shares table"), columns, rows, values.flat[order].tolist())]


class SharesArray(_Shares, np.ndarray):
    """NumPy's; what is computed or cut from it is a plain array."""

    def __array_wrap__(self, array: Any, *_: Any) -> Any:
        return array.view(np.ndarray)[()]

    def __getitem__(self, key: Any) -> Any:
        return self.view(np.ndarray)[key]

    def __repr__(self) -> str:
        return repr(self.view(np.ndarray))


@cache
def _tensor() -> Any:
    """PyTorch's; results of its operations, copies and what is read from a pickle are plain tensors."""
    import torch

    class SharesTensor(_Shares, torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        def __repr__(self) -> str:  # type: ignore[override]
            return repr(self.as_subclass(torch.Tensor))

        def __reduce_ex__(self, protocol: Any) -> Any:
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

        def __deepcopy__(self, memo: Any) -> Any:
            return self.as_subclass(torch.Tensor).__deepcopy__(memo)  # type: ignore[no-untyped-call]

    return SharesTensor


def with_tokens(shares: Any, tokens: Any) -> Any:
    """The same array, which a notebook shows with these tokens; it shares its memory."""
    shown: Any = shares.view(SharesArray) if isinstance(shares, np.ndarray) else shares.as_subclass(_tensor())
    shown.names = tokens
    return shown
