"""seen.verify: the model run again without an edge, beside the estimate."""

import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import DtypeError, RuleError
from seeds import fresh
from watched import build


@pytest.mark.parametrize("what", ["edges", "renormalise", "first"])
def test_what_is_verified_agrees_with_the_edit_by_hand(what: Any):
    """Single edges of both kinds, or spans of a kind, in several layers and heads."""
    model, ids = build("gpt2"), torch.from_numpy(fresh().integers(2, 59, (1, 9)))

    def number() -> torch.Tensor:
        return model(ids).logits[0, -1].logsumexp(0)

    with ch.watch(model, causes=True) as seen:
        number().backward()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    groups = {"a": slice(0, 2), "b": [2, 5, 6], "c": [slice(3, 5), slice(7, None)]}
    if what == "edges":
        some = seen.strongest(6) + seen.strongest(3, rest="first")
        places = [((edge.query,), (edge.key,), edge.rest) for edge in some]
    else:
        some = seen.spans(groups, rest=what).strongest(4)
        places = [(pair.queries, pair.keys, what) for pair in some]
    result = seen.verify(some, number)
    for one, (queries, keys, rest), line in zip(some, places, result, strict=True):
        cut = ch.cut(queries=queries, keys=keys, layers=[one.layer], heads=[one.head], rest=rest)
        with torch.no_grad(), ch.change(model, cut):
            after = number()
        with torch.no_grad():
            assert line.truth == pytest.approx(float(after - number()), abs=1e-6)
        rows, columns = (np.isin(np.arange(9), side) - 1 for side in (queries, keys))
        estimate = float(seen.cut_effects(one.layer, rest=rest).spans(rows, columns)[0, one.head, 0, 0])
        assert line.estimate == one.value == pytest.approx(estimate, rel=1e-4, abs=1e-6)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert ("rank correlation" if what == "edges" else "c ← ") in str(result)
    assert all(len(text) <= 80 for text in str(result).splitlines())


def test_what_cannot_be_verified_is_refused():
    model, ids = build("gpt2", n_layer=1), torch.tensor([[1, 2, 3], [4, 5, 6]])
    with ch.watch(model, causes=True) as both:
        model(ids).logits.sum().backward()
    with pytest.raises(RuleError, match="2 texts were watched together"):
        both.verify(both.strongest(2), lambda: 0.0)
    with ch.watch(model, causes=True) as seen:
        model(ids[:1]).logits.sum().backward()
    edges = seen.strongest(2)
    wrong: Any = [(0, 1)]
    with pytest.raises(DtypeError, match=r"expected what seen\.strongest gives"):
        seen.verify(wrong, lambda: 0.0)
    with pytest.raises(DtypeError, match="run is 3"):
        seen.verify(edges, 3)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="expected one number"):
        seen.verify(edges, lambda: torch.zeros(2))
    again = pickle.loads(pickle.dumps(seen))
    with pytest.raises(RuleError, match="model that was watched is gone"):
        again.verify(edges, lambda: 0.0)
    del model
    gc.collect()
    with pytest.raises(RuleError, match="model that was watched is gone"):
        seen.verify(edges, lambda: 0.0)
