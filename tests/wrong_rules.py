"""Which keys wrong code lets a query see, and what it adds to the scores."""

import torch


def seen_by(n, m, does, rules, batch, heads, details):
    """The visibility, bool (batch, heads, n, m), with the mistakes about masks."""
    i, j = torch.arange(n)[:, None], torch.arange(m)[None, :]
    offset, odd = rules.get("query_offset", 0), details["which"] % 2
    if "causal mask in the other corner" in does:
        offset = 0 if offset else m - n
    seen = torch.ones(batch, heads, n, m, dtype=torch.bool)
    if "rules joined by or" in does:
        lengths = torch.tensor(rules["kv_lengths"])[:, None, None, None]
        return seen & ((j <= i + offset) | (j < lengths))
    if rules.get("causal") and "causal mask missing" not in does:
        if "causal mask inverted" in does:
            seen &= j > i + offset
        elif "causal mask strict" in does:
            seen &= j < i + offset
        else:
            seen &= j <= i + offset + ("causal mask one ahead" in does)
    if "window" in rules and "window missing" not in does:
        left, right = rules["window"]
        if "window off by one" in does:
            left -= 1
        if "window on both sides" in does:
            right = left
        if "window on the left only" in does:
            right = 0
        if "window halved" in does:
            left, right = ((left + 1) // 2, (left + 1) // 2) if odd else ((left + 1) // 2, right)
        if "window open to the right" in does:
            right = m
        if "window without the query's position" in does:
            seen &= j != i + offset
        seen &= (j >= i + offset - left) & (j <= i + offset + right)
    if "mask" in rules and "mask ignored" not in does:
        mask = torch.tensor(rules["mask"])
        mask = ~mask if "mask inverted" in does else mask.T if "mask transposed" in does else mask
        if "mask tiled over heads" in does:  # (batch, n, m) made (batch·heads, n, m) in the wrong order
            mask = mask[:, 0].repeat(heads, 1, 1).view(batch, heads, n, m)
        seen &= mask
    if "kv_lengths" in rules and "padding ignored" not in does:
        lengths = torch.tensor(rules["kv_lengths"])[:, None, None, None]
        paddings = {
            "padding inverted": j >= lengths,
            "padding on queries": i < lengths,
            "padding on the left": j >= m - lengths,
            "padding off by one": j < lengths + (1 if odd else -1),
        }
        seen &= next((inside for name, inside in paddings.items() if name in does), j < lengths)
    if "query_segments" in rules and "segments ignored" not in does:
        of_queries, of_keys = torch.tensor(rules["query_segments"]), torch.tensor(rules["kv_segments"])
        seen &= (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
    if "query_lengths" in rules and "query lengths ignored" not in does:
        seen &= i < torch.tensor(rules["query_lengths"])[:, None, None, None]
    return seen


def alibi(n, m, rules, dtype, does, details=None):
    """What ALiBi subtracts."""
    far = (torch.arange(n)[:, None] + rules.get("query_offset", 0) - torch.arange(m)).abs()
    slopes = torch.tensor(rules["alibi_slopes"], dtype=dtype)
    if "other ALiBi slopes" in does:
        slopes = (slopes.flip(0), slopes.roll(-1), slopes**2, slopes.flip(0))[details["which"]]
    return slopes[:, None, None] * far


def spanned(rules, s):
    """What the table adds to the scores."""
    of_queries, theirs, table = (torch.tensor(part) for part in rules["spans"])
    added = torch.stack([table[:, of_queries[b]][:, :, theirs[b]] for b in range(len(s))]).to(s.dtype)  # -1 is the last
    labelled = (of_queries[:, None, :, None] >= 0) & (theirs[:, None, None, :] >= 0)
    return torch.where(labelled, added, 0.0)
