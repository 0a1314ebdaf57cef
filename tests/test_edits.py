"""Edits as values, the words of a text, and one edited call on NumPy arrays and tensors alike."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.changing.applying import EditedCall, acts, edited
from clearhead.errors import ClearheadError, DtypeError, RuleError, SelectionError, UnknownNameError
from clearhead.models import model as gpt2
from clearhead.watching.pieces import pieces_of
from clearhead.watching.places import Place, Text, find, read_places
from seeds import fresh

EDITS = [
    ch.cut(queries="on", keys="sat", layers=[0]),
    ch.cut(queries=np.array([3, -1]), layers=["decoder.1.cross"], heads=[2]),
    ch.cut(queries=["on", 4, slice(-3, None, 2)], rest="first"),
    ch.boost(keys=slice(0, 12), by=2, queries=slice(None, -4), layers=[-1, "encoder.0"]),
    ch.boost(keys="sat#2", by=0.3, heads=(0, 0, 2)),
    ch.off(heads=[2]),
    ch.off(layers=range(2), to="mean"),
]


def test_edits_print_compare_and_hash_as_what_they_say():
    for edit in EDITS:
        assert eval(f"ch.{edit!r}", {"ch": ch}) == edit
    assert repr(EDITS[0]) == "cut(queries='on', keys='sat', layers=[0])"
    assert repr(EDITS[1]) == "cut(queries=[3, -1], layers=['decoder.1.cross'], heads=[2])"
    assert repr(EDITS[4]) == "boost(keys='sat#2', by=0.3, heads=[0, 2])"
    assert len(set(EDITS + list(EDITS))) == len(EDITS)
    assert ch.cut(keys=[1, 2]) == ch.cut(keys=(1, 2)) != ch.cut(queries=[1, 2])
    assert ch.off(layers=["-1"], heads=[2]) == ch.off(layers=[-1], heads=(2,))
    assert ch.boost(keys=1, by=2) != ch.boost(keys=1, by=3)
    assert ch.cut(keys=3) != "cut(keys=3)"


WRONG: list[tuple[Any, type[ClearheadError], str]] = [
    (lambda: ch.cut(), RuleError, "cut has neither queries nor keys"),
    (lambda: ch.cut(keys=1, rest="last"), UnknownNameError, "unknown rest `last`"),
    (lambda: ch.cut(keys=[]), SelectionError, "keys is empty"),
    (lambda: ch.cut(keys=slice(5, 5)), SelectionError, r"keys is slice\(5, 5, None\): it chooses nothing"),
    (lambda: ch.cut(keys=np.ones((2, 2))), DtypeError, r"keys is a ndarray of shape \(2, 2\)"),
    (lambda: ch.cut(keys=1, layers=0), SelectionError, r"layers is 0: expected a list of layers"),
    (lambda: ch.cut(keys=1, heads=[]), SelectionError, "heads is empty"),
    (lambda: ch.cut(keys=1, heads=[-1]), SelectionError, "heads holds -1"),
    (lambda: ch.boost(keys=None, by=1), RuleError, "boost has no keys"),
    (lambda: ch.boost(keys=1, by=np.inf), RuleError, "by is inf: expected a finite number"),
    (lambda: ch.like(3), DtypeError, "seen is 3: expected what `with ch.watch"),
]


@pytest.mark.parametrize(("make", "kind", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_what_makes_no_sense_is_refused_by_name(make: Any, kind: type[ClearheadError], words: str):
    with pytest.raises(kind, match=words):
        make()


RHYME = ["hum", "pty", " d", "umpty", " sat", " on", " a", " wall", ",", " h", "umpty", " d", "umpty", " sat", " down"]


def positions(places: Any, pieces: list[str] | None = None) -> list[int]:
    pieces = RHYME if pieces is None else pieces
    result = find("keys", read_places("keys", places), Text(len(pieces), [pieces]))
    return np.flatnonzero(result.labels(range(len(pieces) + 5))[0] == 0).tolist()


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ("wall", [7]), ("on a wall", [5, 6, 7]), ("humpty#2", [9, 10]), ("humpty", None), ("humpty#all", [0, 1, 9, 10]),
        ("dumpty#1", [2, 3]), ("dumpty#3", None), ("all", None), ("Wall", None), ("wall,", [7, 8]),
        (["on", "wall"], [5, 7]), (-1, [14]), (15, None), (-16, None),
        (slice(13, None), [13, 14, 15, 16, 17, 18, 19]), (slice(-2, None, 2), [13, 15, 17, 19]),
        (slice(15, 17), [15, 16]), (slice(None, -13), [0, 1]), ([0, "down", slice(3, 5)], [0, 3, 4, 14]),
    ],
)  # fmt: skip
def test_places_of_a_text(places: Any, expected: list[int] | None):
    if expected is None:
        with pytest.raises(SelectionError, match="keys"):
            positions(places)
    else:
        assert positions(places) == expected


def test_words_of_texts_without_spaces_and_of_split_characters():
    assert positions("关注", ["我们", "关", "注", "它"]) == [1, 2]
    assert positions("é", ["a ", "", "", "é", " b"]) == [1, 2, 3]
    assert positions("a#1", ["a", " a", "#1"]) == [1, 2], "the word as it stands comes first"


def test_pieces_keep_the_spaces_that_decoding_alone_drops():
    words = ["▁hum", "pty", "▁sat", "▁é", "x"]

    def decode(ids: list[int]) -> str:  # as SentencePiece: the first space is dropped
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert pieces_of(range(5), decode) == ["hum", "pty", " sat", " é", "x"]
    raw = [b"a", *(bytes([byte]) for byte in "é€".encode()), b"b", b"\xff"]
    assert (
        "".join(pieces_of(range(len(raw)), lambda ids: b"".join(raw[i] for i in ids).decode(errors="replace")))
        == "aé€b\ufffd"
    )
    shipped = gpt2.load().tokenizer.encoder
    text = "humpty dumpty sat on a wall, naïve 漢字 😀"
    ids = shipped.encode(text).ids
    assert "".join(pieces_of(ids, lambda some: shipped.decode(some, skip_special_tokens=False))) == shipped.decode(ids)


CALL = [
    ch.cut(queries=slice(3, None), keys=[0, 2], heads=[0, 3]),
    ch.cut(queries=[4, 8], keys=slice(0, 3), heads=[1, 2], rest="first"),
    ch.boost(keys=slice(2, 5), by=-1, heads=[1, 2]),
    ch.off(to="mean", heads=[2]),
]


def place(n: int, m: int) -> Place:
    return Place("0", range(n), range(m), Text(n), Text(m))


@pytest.mark.parametrize("rule", ["window", "mask", "bias", "kv_lengths", "query_lengths", "segments", "offset"])
def test_an_edit_acts_where_the_rules_let_it_change_the_output(rule: str):
    rng, m = fresh(), 70
    n = int(rng.choice([5, 130]))
    q, k, v = (rng.standard_normal((2, h, size, 4)) for h, size in ((4, n), (2, m), (2, m)))
    parts: dict[str, dict[str, Any]] = {
        "window": {"window": (int(rng.integers(3)), int(rng.integers(3))), "query_offset": int(rng.integers(-9, 60))},
        "mask": {"mask": rng.random((2, int(rng.choice([1, 4])), 1, m)) < 0.3},
        "bias": {"bias": np.where(rng.random((1, 4, n, m)) < 0.1, 0.0, -np.inf)},
        "kv_lengths": {"kv_lengths": rng.integers(0, m, 2)},
        "query_lengths": {"query_lengths": rng.integers(0, n, 2)},
        "segments": {"query_segments": rng.integers(0, 9, (2, n)), "kv_segments": rng.integers(0, 9, (2, m))},
        "offset": {"causal": True, "query_offset": rng.integers(-n, m, 2)},
    }
    for _ in range(20):
        places = (tuple(rng.choice(size, rng.integers(1, 4), replace=False).tolist()) for size in (n, m))
        edit = ch.cut(queries=next(places), keys=next(places), heads=[int(rng.integers(4))])
        changed = edited(EditedCall(q, k, v, parts[rule]), [edit], place(n, m)).output()
        differs = (changed != ch.attention(q, k, v, **parts[rule])).any()
        assert acts(edit, (2, 4, n, m), parts[rule], place(n, m)) == differs


@pytest.mark.parametrize("sinks", [False, True])
def test_moved_weights_are_dense_rows_and_change_as_cuts_say(sinks: bool):  # noqa: FBT001
    rng = fresh()
    q, k, v, g = (rng.standard_normal((2, h, n, 8)) for h, n in ((4, 9), (2, 12), (2, 12), (4, 9)))
    mask = rng.random((2, 4, 9, 12)) < 0.7
    mask[..., 0] |= not sinks
    rules = {"causal": True, "query_offset": 3, "softcap": 3.0, "mask": mask}
    rules |= {"sinks": rng.standard_normal(4), "window": (6, None)} if sinks else {}
    queries, keys = (np.sort(rng.choice(n, 5, replace=False)) for n in (9, 12))
    edits = [ch.cut(queries=list(queries), keys=list(keys), rest="first")]
    call = edited(EditedCall(q, k, v, rules), edits, place(9, 12))
    A, after = ch.AttentionMatrix(q, k, **rules), ch.AttentionMatrix(call.q, call.k, **call.whole_rules())[...]
    expected, chosen = A[...], np.ix_(range(2), range(4), queries, keys[keys > 0] if not sinks else keys)
    moved, expected[chosen] = expected[chosen].sum(-1), 0
    expected[:, :, queries, 0] += 0 if sinks else moved
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-13)
    change = (g * (call.output() - ch.attention(q, k, v, **rules))).sum(-1)
    E = A.cut_effects(v, g, rest="first")
    np.testing.assert_allclose(change[:, :, queries], E[...][:, :, queries][..., keys].sum(-1), rtol=0, atol=1e-12)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    torch.autograd.gradcheck(
        lambda *x: edited(EditedCall(*x, rules), edits, place(9, 12)).output(), tensors, fast_mode=True
    )


@pytest.mark.gate
def test_an_edited_call_takes_memory_for_queries_and_keys_only():
    n, rng = 4096, fresh()
    q, k, v = rng.standard_normal((3, 1, 4, n, 8)).astype(np.float32)
    edited(EditedCall(q[:, :, :9], k[:, :, :9], v[:, :, :9], {"causal": True}), CALL, place(9, 9)).output()
    tracemalloc.start()
    edited(EditedCall(q, k, v, {"causal": True}), CALL, place(n, n)).output()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * n * 1024, "one byte for each weight would be 64 MiB"
