"""ch.change: each edit equals the same edit made by hand on stored logits, and the model is unchanged afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import clearhead as ch
from changed import ByHand, added, by_hand, divided, mean, shared, times
from clearhead.changing.edits import Edit
from clearhead.errors import DtypeError, RuleError, SelectionError, ShapeError
from watched import FAMILIES, Family, build, inputs, logits

FAMILY = {family.name: family for family in FAMILIES}
CUT = -torch.inf


def close(found: torch.Tensor, expected: torch.Tensor, rows: Any = slice(None)) -> None:
    """Within 1e-5 of the largest number."""
    size = float(expected[rows].abs().max())
    torch.testing.assert_close(found[rows], expected[rows], rtol=0, atol=1e-5 * size)


def edited(family: Family, edits: Any, hand: ByHand, *, padding: str = "", **options: Any) -> torch.Tensor:
    """The logits with these edits, checked against those made by hand."""
    model, given = build(family), inputs(family, padding)
    with torch.no_grad():
        before = logits(model(**given))
        with by_hand(model, hand):
            expected = logits(model(**given))
        with ch.change(model, edits, **options):
            found = logits(model(**given))
        after = logits(model(**given))
    assert torch.equal(before, after), "the model is not as it was"
    rows = given["attention_mask"].bool() if padding else slice(None)
    close(found, expected, rows)
    assert not torch.allclose(found[rows], before[rows], atol=1e-3), "the edits changed nothing"
    return found


ROWS, KEYS = [6, 7, 8, 9, 10], [1, 2, 4]
CASES: list[tuple[list[Edit], ByHand]] = [
    ([ch.cut(queries=slice(6, None), keys=KEYS)], ByHand([added(CUT, ROWS, KEYS)])),
    ([ch.cut(queries=[9, -1], heads=[1])], ByHand([added(CUT, [9, 10], None, [1])])),
    ([ch.cut(keys=slice(0, 3), heads=[0, 3])], ByHand([added(CUT, None, [0, 1, 2], [0, 3])])),
    ([ch.cut(keys=[i in KEYS for i in range(11)])], ByHand([added(CUT, None, KEYS)])),
    ([ch.boost(keys=KEYS, by=1.5, queries=ROWS)], ByHand([added(1.5, ROWS, KEYS)])),
    ([ch.boost(keys=-2, by=-3, heads=[2])], ByHand([added(-3.0, None, [9], [2])])),
    ([ch.share(keys=KEYS, at_least=0.6)], ByHand([shared(0.6, None, KEYS)])),
    ([ch.share(keys=[3], at_least=0.2, queries=ROWS, heads=[0, 1])], ByHand([shared(0.2, ROWS, [3], [0, 1])])),
    ([ch.tempered(2.5)], ByHand([divided(2.5)])),
    ([ch.tempered(0.4, heads=[1, 2])], ByHand([divided(0.4, [1, 2])])),
    ([ch.off(heads=[1])], ByHand(outputs=[times(0.0, [1])])),
    ([ch.off(to="mean", heads=[0, 2])], ByHand(outputs=[mean([0, 2])])),
    ([ch.scaled(-0.5, heads=[3])], ByHand(outputs=[times(-0.5, [3])])),
    ([ch.off(to="mean", heads=[0]), ch.scaled(2, heads=[0, 1])], ByHand(outputs=[mean([0]), times(2.0, [0, 1])])),
]


@pytest.mark.parametrize(("edits", "hand"), CASES, ids=lambda case: str(case) if isinstance(case, list) else "")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_each_edit_equals_the_same_edit_by_hand(family: str, edits: list[Edit], hand: ByHand):
    edited(FAMILY[family], edits, hand)


EVERYTHING = [
    ch.share(keys=[1, 2], at_least=0.4),
    ch.tempered(1.5, heads=[0, 3]),
    ch.cut(queries=slice(5, None), keys=[0, 3], heads=[0, 1]),
    ch.boost(keys=[2, 4], by=2, heads=[1, 2]),
    ch.share(keys=[4, 5], at_least=0.5, queries=slice(3, 9)),
    ch.tempered(0.8),
    ch.scaled(1.5, heads=[3]),
]
BY_HAND = ByHand(
    [
        shared(0.4, None, [1, 2]),
        divided(1.5, [0, 3]),
        added(CUT, range(5, 99), [0, 3], [0, 1]),
        added(2.0, None, [2, 4], [1, 2]),
        shared(0.5, range(3, 9), [4, 5]),
        divided(0.8),
    ],
    [times(1.5, [3])],
)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("padding", ["", "left", "right"])
def test_edits_act_in_the_order_given(family: str, padding: str):
    edited(FAMILY[family], EVERYTHING, BY_HAND, padding=padding)
