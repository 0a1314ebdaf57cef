"""A sentence about the evidence, as data, and said in English or Chinese."""

from typing import Any, NamedTuple

from clearhead.words import Language, counted, filled
from clearhead.words.known import AXES, KNOWN, MANNERS, OTHERS, TRIED


class Reason(NamedTuple):
    """A key in words/known.py, and the values that the sentence names."""

    key: str
    values: dict[str, Any]


def said(reason: Reason, language: Language) -> str:
    """The sentence, "en" or "zh"."""
    chinese = language == "zh"
    values = dict(reason.values)
    if isinstance(values.get("names"), list):
        values["names"] = ("、" if chinese else ", ").join(values["names"])
    values |= _counted(values)
    if reason.key in KNOWN and "how" not in values:
        return filled(KNOWN[reason.key][chinese], **values)
    if reason.key.startswith("mixes ") and reason.key[6:] in OTHERS:
        return filled(
            (
                "your numbers are {own:.4g} times the right ones plus {share:.4g} times {other}",
                "您的结果是正确结果的 {own:.4g} 倍，加上 {other} 的 {share:.4g} 倍",
            )[chinese],
            **values,
            other=OTHERS[reason.key[6:]][chinese],
        )
    if "how" in values:
        values["how"] = TRIED[values["how"]][chinese]
        return filled(KNOWN[reason.key][chinese], **values)
    what, _, axis = reason.key.rpartition(" ")
    one, many, zh = AXES[axis]
    by = {1: ("next", "后一个"), -1: ("previous", "前一个")}.get(values.get("by", 0), ("", ""))
    if what == "right":
        words = (f"right {many}: {{right}}; wrong: {{wrong}}", f"正确的{zh}：{{right}}；有误的：{{wrong}}")
        return filled(words[chinese], **values)
    manner, _, moved = what.rpartition(" ")
    places = {
        "next": (f"of the {by[0]} {one}", f"{by[1]}{zh}的正确输出"),
        "reversed": (f"with the {many} in reverse order", f"{zh}顺序颠倒后的正确输出"),
        "first": (f"of the first {one}", f"第一个{zh}的正确输出"),
        "mean": (f"averaged over the {many}", f"各个{zh}正确输出的平均"),
        "values": (f"made with the values of the {by[0]} {one}", f"用{by[1]}{zh}的值算出的输出"),
    }[moved]
    words = MANNERS[manner]
    return filled(words[chinese], **values, place=places[chinese])


def _counted(values: dict[str, Any]) -> dict[str, str]:
    """Numbers with their English nouns: one output, 3 outputs."""
    count, rows = values.get("count", 0), values.get("rows", 0)
    nouns = {
        "numbers": (count, "number"),
        "outputs": (count, "output"),
        "keys": (count, "key"),
        "in_rows": (rows, "row"),
    }
    return {name: counted(many, noun) for name, (many, noun) in nouns.items()}
