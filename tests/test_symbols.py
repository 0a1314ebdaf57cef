"""Shapes in symbols: with numbers in the place of the symbols they are the shapes of the numbers."""

import json
import re
from math import prod

import numpy as np
import pytest

import clearhead as ch
from clearhead.cli import main
from clearhead.errors import RuleError, ShapeError, UnknownNameError
from clearhead.textbook.layer_shapes import NAMES, layer_shapes, read_sizes
from clearhead.textbook.symbols import Term, read_size, total
from seeds import fresh


def value(size, numbers):
    """What a size comes to with these numbers."""
    return size.number * prod(numbers[s] ** p for s, p in size.powers) if isinstance(size, Term) else size


def drawn():
    rng = fresh()
    numbers = {name: int(rng.integers(2, 9)) for name in ("B", "n", "m", "h_kv", "d_k", "d_v", "d_model")}
    return numbers | {"h": numbers["h_kv"] * int(rng.integers(1, 4))}


def of_layer(sizes):
    """A layer's shapes, written out here."""
    b, n, m, h, kv, d_k, d_v, d = (sizes[name] for name in ("B", "n", "m", "h", "h_kv", "d_k", "d_v", "d_model"))

    def times(a, b):
        return f"{a}·{b}" if isinstance(a, str) else a * b

    return {"x": (b, n, d), "w_q": (d, times(h, d_k)), "w_k": (d, times(kv, d_k)), "w_v": (d, times(kv, d_v))} | {
        "w_o": (times(h, d_v), d), "context": (b, m, d), "num_heads": h,
    }  # fmt: skip


@pytest.mark.parametrize("convention", ["rows", "columns"])
def test_symbols_give_the_shapes_and_costs_of_the_numbers(convention):
    numbers = drawn()

    def steps(sizes):
        passed = of_layer(sizes)
        if convention == "columns":
            passed |= {k: (*v[:-2], v[-1], v[-2]) for k, v in passed.items() if k != "num_heads"}
        return ch.shapes(**passed, convention=convention)

    words, counted = steps({name: name for name in numbers}), steps(numbers)
    for a, b in zip(words, counted, strict=True):
        assert tuple(value(size, numbers) for size in a.shape) == b.shape
        assert value(a.multiply_adds, numbers) == b.multiply_adds
        assert value(a.bytes, numbers) == b.bytes
        assert a.axes == b.axes
    assert "(B, h, n, m)" in str(words) if convention == "rows" else "(B, h, m, n)" in str(words)
    assert "in all: " in str(words)


def test_symbols_and_numbers_go_together():
    steps = ch.shapes(("n", 64), ("m", 64), ("m", "d_v"))
    assert [str(size) for size in steps[-1].shape] == ["n", "d_v"]
    assert str(steps[3].multiply_adds) == "64·n·m"
    assert steps[0].sizes == "(n, 64)"
    assert str(ch.shapes(("n", 512), (3, 512), (3, 512))[3].shape) == "(n, 3)"
    heads = ch.shapes(x=("n", 512), w_q=(512, 512), w_k=(512, 512), w_v=(512, 512), num_heads="h")
    assert [str(size) for size in heads[1].shape] == ["h", "n", "512/h"]
    assert heads[-2].formula == "H = concat(O_0 … O_{h-1})"


@pytest.mark.parametrize(
    ("text", "written"),
    [("n", "n"), ("2*n * n", "2·n²"), ("d_model/h", "d_model/h"), ("6·h/(3)", None), ("6·h/3", "2·h"), ("n/n", "1"),
     ("m·n", "n·m"), ("n/2·h", None), ("0·n", "0"), ("n-1", None), ("", None), ("n/", None), ("n/0", None),
     ("9" * 5000, None), (2.5, None), (-1, None), (True, None), (7, "7")],
)  # fmt: skip
def test_sizes_are_read_and_written(text, written):
    size = read_size(text)
    assert (None if size is None else str(size)) == written


def test_sums_join_equal_symbols():
    n, m = read_size("n"), read_size("m")
    assert total([n * m, 2 * m * n, n, 5, 1000]) == "3·n·m + n + 1,005"
    assert total([]) == total([0]) == "0"


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ch.shapes(("n", "d"), ("m", "e"), ("m", "e")), ShapeError, "q has d_k d but k has d_k e"),
        (lambda: ch.shapes(("n", "d"), ("m", "d"), ("n", "d")), ShapeError, "v has n keys but k has m"),
        (lambda: ch.shapes(("n", "d"), ("n+1", "d"), ("n", "d")), ShapeError, "in whole numbers or symbols"),
        (lambda: ch.shapes(x=("n", "d"), w_q=("e", "d"), w_k=("d", "d"), w_v=("d", "d")), ShapeError, "w_q is"),
        (lambda: ch.shapes(x=(2, 4), w_q=(4, 4), w_k=(4, 4), w_v=(4, 4), num_heads="h+1"), RuleError, "or a symbol"),
        (lambda: ch.trace_layer(np.eye(2), *[np.eye(2)] * 3, num_heads="h"), RuleError, "expected a whole number"),
        (lambda: read_sizes(["q=3"]), UnknownNameError, "unknown size `q`"),
        (lambda: read_sizes(["n=0"]), RuleError, "n is '0'"),
        (lambda: read_sizes(["n="]), RuleError, "n is ''"),
        (lambda: layer_shapes({"d_model": 10, "h": 3}), RuleError, "not divisible by h 3"),
        (lambda: layer_shapes({"h": 4, "h_kv": 3, "d_k": 2}), ShapeError, "multiple of key heads"),
        (lambda: layer_shapes({"t": 3}), UnknownNameError, "unknown size `t`"),
    ],
)
def test_errors_say_what_is_wrong(call, error, words):
    with pytest.raises(error, match=re.escape(words)):
        call()


def test_a_layer_from_its_sizes_alone():
    numbers = drawn()
    result = layer_shapes(numbers)
    expected = ch.shapes(**of_layer(numbers))
    assert result.numbers is not None
    assert [(s.shape, s.multiply_adds, s.bytes) for s in result.numbers] == [
        (s.shape, s.multiply_adds, s.bytes) for s in expected
    ]
    for name, (symbols, count) in result.parameters.items():
        assert value(symbols, numbers) == count == prod(of_layer(numbers)[name])
    assert layer_shapes({}).numbers is None
    assert layer_shapes({"n": 3, "h": 2, "d_k": 4}).numbers[-1].shape == (3, 8)
    part = layer_shapes({"B": None, "n": 3})
    assert str(part.numbers[-1].shape) == "(B, 3, d_model)"


def test_the_command_prints_symbols_beside_numbers(capsys):
    assert main(["shapes", "n=12", "d_model=512", "h=8"]) == 0
    said = capsys.readouterr().out
    assert "S = Q·Kᵀ                    (h, n, n)             (8, 12, 12)" in said
    assert "h·n²·d_k = 73,728 multiply-adds" in said
    assert "parameters in all: 2·h·d_model·d_k + 2·h·d_model·d_v = 1,048,576" in said
    assert main(["shapes", "--lang", "zh"]) == 0
    assert "h·n²·d_k 次乘加" in capsys.readouterr().out
    assert main(["shapes", *NAMES, "--json", "-"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert steps[-1]["shape"] == ["B", "n", "d_model"]
    assert main(["shapes", "d_model=10", "h=3"]) == 2
    assert capsys.readouterr().out == ""
