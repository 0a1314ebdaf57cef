"""Parts of a problem as problems of their own: some queries, some keys, one batch."""

from dataclasses import replace
from typing import Any

import numpy as np

from problems import Case


def only_queries(case: Case, start: int, stop: int) -> Case:
    """The case for queries start … stop alone, as a user would call it."""
    rules = _cut(case, (slice(start, stop), slice(None)))
    if "query_segments" in rules:
        rules["query_segments"] = rules["query_segments"][..., start:stop]
    if "spans" in rules:
        ours, theirs, table = rules["spans"]
        rules["spans"] = ours[..., start:stop], theirs, table
    if "query_lengths" in rules:
        rules["query_lengths"] = np.clip(np.asarray(rules["query_lengths"]) - start, 0, stop - start)
    rules["query_offset"] = np.asarray(rules.get("query_offset", 0)) + start
    return replace(case, q=case.q[..., start:stop, :], rules=rules)


def only_keys(case: Case, start: int, stop: int) -> Case:
    """The case for keys start … stop alone: what one machine of several holds."""
    rules = _cut(case, (slice(None), slice(start, stop)))
    if "kv_segments" in rules:
        rules["kv_segments"] = rules["kv_segments"][..., start:stop]
    if "spans" in rules:
        ours, theirs, table = rules["spans"]
        rules["spans"] = ours, theirs[..., start:stop], table
    if "kv_lengths" in rules:
        rules["kv_lengths"] = np.clip(np.asarray(rules["kv_lengths"]) - start, 0, stop - start)
    rules["query_offset"] = np.asarray(rules.get("query_offset", 0)) - start
    return replace(case, k=case.k[..., start:stop, :], v=case.v[..., start:stop, :], rules=rules)


def only_batch(case: Case, place: int) -> Case:
    """One entry of the first batch axis; the axis is kept."""
    rules = _cut(case, (slice(place, place + 1), *(slice(None),) * (case.q.ndim - 1)))
    for name in ("kv_lengths", "query_lengths", "query_offset", "query_segments", "kv_segments"):
        value = np.asarray(rules.get(name, 0))
        if value.ndim > (1 if "segments" in name else 0):
            rules[name] = value[place : place + 1]
    if "spans" in rules:
        least = case.q.ndim - 3, case.q.ndim - 3, case.q.ndim - 1  # axes of labels and of a table without batch axes
        rules["spans"] = tuple(
            x[place : place + 1] if x.ndim > n and len(x) > 1 else x for x, n in zip(rules["spans"], least, strict=True)
        )
    q, k, v = (x[place : place + 1] for x in (case.q, case.k, case.v))
    return replace(case, q=q, k=k, v=v, rules=rules)


def _cut(case: Case, where: tuple[slice, ...]) -> dict[str, Any]:
    """The rules, with mask and bias in full and cut on their last axes."""
    rules = dict(case.rules)
    for name in ("mask", "bias"):
        if name in rules:
            full = np.broadcast_to(rules[name], case.matrix().shape)
            rules[name] = full[(..., *where)]
    return rules
