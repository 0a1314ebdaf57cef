"""Observations over parts of the keys or queries merge into the observation of the whole."""

from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.core.statistics import PER_QUERY, listed
from passes import only_keys, only_queries
from problems import RULES, Case, cases
from seeds import normal
from slack import Slack, assert_close, assert_rows

FLOATS = (np.dtype(np.float64), np.dtype(np.float32))  # narrower ones round each part's output once more
NO_SINKS = tuple(rule for rule in RULES if rule != "sinks")
EACH_PART = 3.0  # each of the two parts and the merge may have the error allowed for the whole


def draw_cuts(data: st.DataObject, size: int) -> list[tuple[int, int]]:
    """Up to four consecutive parts of `size`; some may be empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    return list(zip([0, *cuts], [*cuts, size], strict=True))


def rows_of(case: Case) -> ch.Observation:
    asked: Any = dict.fromkeys(listed(axes=PER_QUERY), True)
    return case.matrix().observe(case.v, top=3, **asked)


def assert_merged(case: Case, seen: ch.Observation) -> None:
    assert_rows(case, seen, 3, times=EACH_PART)
    assert (seen.queries, seen.keys) == (case.problem.queries, case.problem.keys)


@given(case=cases(rules=NO_SINKS, dtypes=FLOATS), data=st.data())
def test_parts_over_keys_merge_into_the_whole_in_any_order(case: Case, data: st.DataObject):
    parts = [rows_of(only_keys(case, *cut)) for cut in draw_cuts(data, case.problem.keys)]
    while len(parts) > 1:
        place = data.draw(st.integers(0, len(parts) - 2))
        parts[place : place + 2] = [parts[place].merge_keys(parts[place + 1])]
    (merged,) = parts
    assert_merged(case, merged)


@pytest.mark.parametrize("far", [-1e9, -3e38, 1e6])
def test_parts_of_rows_far_from_zero_merge_as_those_near(far: float):
    q, k, v = (np.round(normal(n, 4)).astype(np.float32) for n in (3, 8, 8))
    seen = []
    for more in (0.0, far):
        rules: Any = {"scale": 0.0, "bias": np.full((1, 1), more, np.float32)}
        parts = [ch.AttentionMatrix(q, k[s], **rules).observe(v[s], logsumexp=True, entropy=True, top=3)
                 for s in (slice(5), slice(5, 8))]  # fmt: skip
        seen.append(parts[0].merge_keys(parts[1]))
    for name in ("output", "entropy", "log_sum"):
        np.testing.assert_allclose(*(getattr(x, name) for x in seen), 1e-5, 1e-6, err_msg=name)
    np.testing.assert_allclose(*(x.top.weights for x in seen), 1e-5)


@given(case=cases(dtypes=FLOATS), data=st.data())
def test_parts_over_queries_merge_into_the_whole(case: Case, data: st.DataObject):
    query_groups, key_groups = case.labels()
    asked: dict[str, Any] = {"logsumexp": True, "entropy": True, "top": 2, "received": True, "peak": True}
    whole = case.matrix().observe(case.v, groups=case.labels(), **asked)
    parts, sliced = [], data.draw(st.booleans())
    for start, stop in draw_cuts(data, case.problem.queries):
        part, labels = only_queries(case, start, stop), (query_groups[..., start:stop], key_groups)
        if sliced:
            seen = case.matrix().observe(case.v, groups=case.labels(), queries=slice(start, stop), **asked)
        else:
            seen = part.matrix().observe(part.v, groups=labels, **asked)
        parts.append(seen)
    merged = reduce(ch.Observation.merge_queries, parts)
    assert merged.top is not None
    assert whole.top is not None
    for name in ("output", "logsumexp", "entropy"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(whole, name), err_msg=name, strict=True)
    np.testing.assert_array_equal(merged.top.indices, whole.top.indices)
    np.testing.assert_array_equal(merged.top.weights, whole.top.weights)
    np.testing.assert_array_equal(merged.peak, whole.peak)
    total = case.restore(Slack(case).weights.sum(axis=-2))
    assert_close(merged.received, whole.received, total, "received")
    assert_close(merged.groups, whole.groups, total.sum(axis=-1)[..., None, None], "groups")
    assert (merged.queries, merged.keys) == (case.problem.queries, case.problem.keys)


def test_images_with_pixels_of_equal_height_are_stacked():
    matrix = ch.AttentionMatrix(normal(12, 4), normal(8, 4))
    upper, lower = (matrix.observe(image=size, queries=s) for size, s in (((4, 3), np.s_[:8]), ((2, 3), np.s_[8:])))
    np.testing.assert_allclose(upper.merge_queries(lower).image, matrix.image(6, 3), rtol=1e-13)


@pytest.mark.parametrize("lead", [(3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize("chosen", [0, -1, [2, 0], slice(1, None), slice(None, None, -1)])
def test_heads_are_chosen_along_their_own_axis(lead: tuple[int, ...], chosen: Any):
    matrix, v = ch.AttentionMatrix(normal(*lead, 5, 4), normal(*lead, 6, 4)), normal(*lead, 6, 2)
    asked = {"logsumexp": True, "max_logit": True, "entropy": True, "distance": True, "received": True, "peak": True}
    seen = matrix.observe(v, **asked, top=2, image=(2, 3), groups=(np.arange(5) % 2, np.arange(6) % 3))
    some = seen.heads(chosen)
    for name in (*asked, "output", "image", "groups"):
        whole = getattr(seen, name)
        expected = np.moveaxis(whole, len(lead) - 1, 0)[chosen]
        result = getattr(some, name)
        result = result if isinstance(chosen, int) else np.moveaxis(result, len(lead) - 1, 0)
        np.testing.assert_array_equal(result, expected, err_msg=name)
    assert some.top is not None
    assert seen.top is not None
    expected = np.moveaxis(seen.top.indices, len(lead) - 1, 0)[chosen]
    result = some.top.indices if isinstance(chosen, int) else np.moveaxis(some.top.indices, len(lead) - 1, 0)
    np.testing.assert_array_equal(result, expected)


def test_selected_heads_of_tensors_keep_their_graph():
    q = torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True)
    seen = ch.AttentionMatrix(q, q).observe(entropy=True, logsumexp=True)
    assert seen.heads(slice(None, None, -1)).entropy.shape == (2, 3)
    assert seen.heads([1]).logsumexp.requires_grad


def test_an_observation_says_whether_sinks_were_included():
    q, sinks = torch.ones(2, 3, 4), torch.zeros(2)
    for needs in (False, True):
        part = ch.AttentionMatrix(q.clone().requires_grad_(needs), q, sinks=sinks).observe(logsumexp=True)
        assert part.sinks
    assert part.heads(0).sinks
    assert not ch.AttentionMatrix(q, q).observe(logsumexp=True).sinks
