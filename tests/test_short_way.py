"""A warm call is short enough to be told: how many files and functions of the package it enters."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.engines import native

PACKAGE = str(Path(ch.__file__).parent)
Q = np.random.default_rng(0).standard_normal((2, 3, 5, 8)).astype(np.float32)
T = torch.from_numpy(Q)
A = ch.AttentionMatrix(Q, Q, causal=True)


def entered(call: Callable[[], Any]) -> tuple[set[str], set[CodeType]]:
    """The files and functions of the package that the third call like this enters."""
    functions: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        inner = frame.f_code.co_name.startswith("<")  # a comprehension, which later versions of Python do not enter
        if event == "call" and not inner and frame.f_code.co_filename.startswith(PACKAGE):
            functions.add(frame.f_code)

    call(), call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {code.co_filename for code in functions}, functions


CALLS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "attention of arrays": (lambda: ch.attention(Q, Q, Q, causal=True), 8, 20),
    "attention of tensors": (lambda: ch.attention(T, T, T, causal=True), 12, 30),
    "A[0, 1, 3]": (lambda: A[0, 1, 3], 10, 30),
}


@pytest.mark.skipif(bool(native.missing()), reason="the native engine is not compiled here")
@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_enters_few_files_and_functions(name: str):
    call, most_files, most_functions = CALLS[name]
    files, functions = entered(call)
    assert len(files) <= most_files, sorted(Path(file).name for file in files)
    assert len(functions) <= most_functions, sorted(code.co_qualname for code in functions)
