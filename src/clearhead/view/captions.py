"""What a head does, as a sentence in both languages, from its statistics."""

from collections.abc import Mapping

from clearhead.words import Language

_SHARE = 0.25  # from this share of the weight on, a head is named by where it goes


def captions(statistics: Mapping[str, float | None]) -> dict[Language, str]:
    """One head's statistics (those of HeadSummary, None where unknown) as a caption.

    >>> captions({"sink": 0.1, "previous": 0.8, "own": 0.02, "distance": 1.4, "entropy": 0.9})["en"]
    'previous-token head: 80 % on the token before'
    """
    known = {name: statistics.get(name) for name in ("previous", "own", "sink")}
    name, share = max(
        ((name, x) for name, x in known.items() if x is not None), key=lambda pair: pair[1], default=("", 0.0)
    )
    said = f"{100 * share:.0f} %"
    if share >= 2 * _SHARE and name == "previous":
        return {"en": f"previous-token head: {said} on the token before", "zh": f"前词头：{said} 落在前一个词元上"}
    if share >= _SHARE:
        where = {
            "previous": ("the token before", "前一个词元"),
            "own": ("itself", "自身"),
            "sink": ("the first token", "首个词元"),
        }
        return {"en": f"{said} on {where[name][0]}", "zh": f"{said} 落在{where[name][1]}上"}
    distance = statistics.get("distance")
    if distance is not None:
        return {
            "en": f"spread out, {distance:.1f} tokens away on average",
            "zh": f"分散，平均距离 {distance:.1f} 个词元",
        }
    return {"en": "spread out", "zh": "分散"}
