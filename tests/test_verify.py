"""seen.verify: the model run again without an edge, beside the estimate."""

import gc
import pickle
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.errors import DtypeError, RuleError
from seeds import fresh
from watched import build


def test_several_layers_and_heads_agree_with_the_edit_by_hand():
    model, ids = build("gpt2"), torch.from_numpy(fresh().integers(1, 40, (1, 9)))

    def number() -> torch.Tensor:
        return model(ids).logits[0, -1].logsumexp(0)

    with ch.watch(model, causes=True) as seen:
        number().backward()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    both = seen.strongest(6) + seen.strongest(3, rest="first")
    for edge in both[6:]:
        assert edge.value == float(seen.cut_effects(edge.layer, rest="first")[0, edge.head, edge.query, edge.key])
    result = seen.verify(both, number)
    for edge, edited in zip(result, both, strict=True):
        cut = ch.cut(queries=edge.query, keys=edge.key, layers=[edge.layer], heads=[edge.head], rest=edited.rest)
        with torch.no_grad(), ch.change(model, cut):
            after = number()
        with torch.no_grad():
            assert edge.truth == pytest.approx(float(after - number()), abs=1e-6)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert "rank correlation" in str(result)
    assert all(len(line) <= 80 for line in str(result).splitlines())


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
