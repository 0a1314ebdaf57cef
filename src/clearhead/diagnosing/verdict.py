"""The verdict in English and Chinese: what their code did, how sure that is, and the line to change."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, NamedTuple

from clearhead.core.rule_values import read_language
from clearhead.diagnosing.known_words import said
from clearhead.diagnosing.mistakes.details import DETAILS
from clearhead.diagnosing.reason import Reason
from clearhead.diagnosing.recipe import Change, Recipe
from clearhead.diagnosing.search import Candidate, Coverage
from clearhead.digits import significant
from clearhead.view.names import Names
from clearhead.words import Language, filled

Outcome = Literal["right", "mistake", "ambiguous", "unexplained"]
Confidence = Literal["sure", "likely", "ambiguous"]


class Place(NamedTuple):
    """The first number that differs: where, theirs, and the right one; `head` is None where the heads are joined."""

    batch: int
    head: int | None
    query: int
    column: int
    theirs: float
    right: float


class Nonfinite(NamedTuple):
    """An input that holds NaN or infinity: the first such number, its index, and how many there are."""

    name: str
    place: tuple[int, ...]
    value: float
    many: int


class AnswerLine(NamedTuple):
    """A line of the answer and its kind: verdict, did, mend, needs, known or note."""

    kind: str
    text: str


@dataclass(frozen=True, eq=False, slots=True)
class MistakeExplanation:
    """What their code may have done: one mistake or two, and how far the numbers these give lie from theirs."""

    candidate: Candidate
    confidence: Confidence
    alike: tuple[Candidate, ...] = ()  # the same mistakes with other details, which fit equally well
    doubts: tuple[Reason, ...] = ()  # why it is likely only

    def __repr__(self) -> str:
        return f"Explanation({' + '.join(self.mistakes)}, residual {self.residual:.2g}, {self.confidence})"

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Their names in the catalogue."""
        return tuple(mistake.name for mistake in self.candidate.mistakes)

    @property
    def residual(self) -> float:
        return self.candidate.residual

    @property
    def tolerance(self) -> float:
        return self.candidate.tolerance

    @property
    def details(self) -> dict[str, Any]:
        """The fields of the textbook's recipe that were changed, such as a block's size, a fill or a rate."""
        fields = {field for change in self.candidate.changes for field in change}
        return {field: getattr(self.candidate.recipe, field) for field in sorted(fields)}

    def did(self, language: Language = "en") -> list[str]:
        """What their code did, a sentence for each mistake."""
        return self._words("did", language)

    def mend(self, language: Language = "en") -> list[str]:
        """The line to change, one for each mistake."""
        return self._words("mend", language)

    def needs(self, language: Language = "en") -> list[str]:
        """What inputs must have so that they show it, for each mistake."""
        return self._words("needs", language)

    def _words(self, what: str, language: Language) -> list[str]:
        read_language(language)
        said = [
            [
                getattr(m, what)[language == "zh"].format(**_details(f.recipe, c, language))
                for m, c in zip(f.mistakes, f.changes, strict=True)
            ]
            for f in (self.candidate, *self.alike)
        ]
        other = _say(language, "or")
        return [
            sentences[0] if len(set(sentences)) == 1 else other.join(dict.fromkeys(sentences))
            for sentences in zip(*said, strict=True)
        ]


@dataclass(frozen=True, eq=False, slots=True)
class Diagnosis:
    """The verdict: right, a mistake, several that fit equally (ambiguous), or none of the known ones (unexplained).

    Prints as a colleague would say it; `told("zh")` says it in Chinese.
    """

    verdict: Outcome
    explanations: tuple[MistakeExplanation, ...]  # those that fit, the best first
    difference: float  # the largest between theirs and the right numbers
    tolerance: float  # what rounding allows
    first_difference: Place | None
    looked: Coverage
    unseen: tuple[MistakeExplanation, ...]  # mistakes that these inputs cannot show
    nonfinite: tuple[Nonfinite, ...] = ()  # inputs that hold NaN or infinity
    known: tuple[Reason, ...] = ()  # what is known where nothing explains the numbers
    tokens: Names = None  # (queries,)
    convention: str = "rows"

    def __str__(self) -> str:
        return self.told()

    def __repr__(self) -> str:
        named = ", ".join(" + ".join(e.mistakes) for e in self.explanations)
        return f"Diagnosis({self.verdict}{': ' if named else ''}{named})"

    def told(self, language: Language = "en") -> str:
        """The whole answer as text, "en" or "zh". Raises RuleError for another language."""
        return "\n".join(line.text for line in self.lines(language))

    def lines(self, language: Language = "en") -> Iterator[AnswerLine]:
        """The answer line by line. Raises RuleError for another language."""
        yield from _lines(self, read_language(language))

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain numbers and words."""
        first = self.first_difference
        return {
            "verdict": self.verdict,
            "explanations": [
                {"mistakes": e.mistakes, "confidence": e.confidence, "residual": _plain(e.residual)}
                | {
                    "tolerance": _plain(e.tolerance),
                    "details": {k: _plain(v) for k, v in e.details.items()},
                    "did": e.did(),
                    "mend": e.mend(),
                }
                | {"needs": e.needs(), "doubts": [said(doubt, "en") for doubt in e.doubts]}
                for e in self.explanations
            ],
            "largest_difference": _plain(self.difference),
            "tolerance": _plain(self.tolerance),
            "first_difference": first and {k: _plain(v) for k, v in first._asdict().items()},
            "looked_at": self.looked._asdict(),
            "known": [{"what": fact.key, **{k: _plain(x) for k, x in fact.values.items()}} for fact in self.known],
            "nonfinite": [{**nonfinite._asdict(), "value": str(nonfinite.value)} for nonfinite in self.nonfinite],
            "unseen": [e.mistakes[0] for e in self.unseen],
        }


_SAID: dict[str, tuple[str, str]] = {
    "right": (
        "your numbers are right: they differ by {difference:.2g} at most, where rounding allows {tolerance:.2g}",
        "你的结果正确：最多相差 {difference:.2g}，在舍入误差允许的 {tolerance:.2g} 之内",
    ),
    "mistake": ("your code has a mistake:", "你的代码有一处错误："),
    "mistakes": ("your code has two mistakes:", "你的代码有两处错误："),
    "ambiguous": (
        "your numbers are wrong, and {count} explanations fit them equally well:",
        "你的结果有误，有 {count} 种解释都同样吻合：",
    ),
    "unexplained": (
        "your numbers are wrong, by up to {difference:.4g}, and none of the known mistakes, alone or in pairs, "
        "explains them",
        "你的结果有误，最多相差 {difference:.4g}；已知的错误，无论单独还是两两组合，都解释不了",
    ),
    "and": ("and ", "并且"),
    "or": (" or ", "，或者"),
    "also": ("; ", "；"),
    "between": (", ", "、"),
    "change": ("    the line to change: {mend}", "    应改为：{mend}"),
    "sure": (
        "how sure: sure. This gives your numbers to within {residual:.2g}, where rounding allows {tolerance:.2g}; "
        "the right result is up to {difference:.4g} away from yours",
        "把握：确定。这样算出的结果与你的仅相差 {residual:.2g}（舍入误差允许 {tolerance:.2g}）；"
        "而正确结果与你的最多相差 {difference:.4g}",
    ),
    "likely": (
        "how sure: likely. This comes within {residual:.2g} of your numbers; the right ones are up to "
        "{difference:.4g} away",
        "把握：很可能。这样算出的结果与你的相差 {residual:.2g}；正确结果与你的最多相差 {difference:.4g}",
    ),
    "no fit": ("how sure: likely", "把握：很可能"),
    "because": ("    not sure, because {why}", "    之所以不能确定：{why}"),
    "known": ("what is known:", "已知的情况："),
    "tell": (
        "    to tell it from the others, try an input with {needs}",
        "    要与其他解释区分，请换用这样的输入：{needs}",
    ),
    "columns": (
        "your tokens are columns; the lines of code above have them as rows, so transpose each matrix: Q·Kᵀ there is "
        "the transpose of your Kᵀ·Q",
        "你的词元按列排列，而以上代码按行书写，每个矩阵都要转置：其中的 Q·Kᵀ 就是你的 Kᵀ·Q 的转置",
    ),
    "less well": ("fits too, but less well: {names}", "也说得通，但吻合得稍差：{names}"),
    "first": (
        "the first difference: batch {batch}, head {head}, query {query}, column {column}: "
        "yours {theirs:.6g}, right {right:.6g}",
        "第一处不同：批次 {batch}，头 {head}，查询 {query}，列 {column}：你的是 {theirs:.6g}，应为 {right:.6g}",
    ),
    "first joined": (
        "the first difference: batch {batch}, query {query}, column {column}: yours {theirs:.6g}, right {right:.6g}",
        "第一处不同：批次 {batch}，查询 {query}，列 {column}：你的是 {theirs:.6g}，应为 {right:.6g}",
    ),
    "sampled": (
        "looked at {batches} batch entries and {queries} queries, not at everything",
        "只检查了 {batches} 个批次条目和 {queries} 个查询，并非全部",
    ),
    "nonfinite": (
        "look at the inputs first: {name}[{place}] is {value}; numbers in {name} that are NaN or infinite: {many}",
        "请先检查输入：{name}[{place}] 为 {value}；{name} 中 NaN 或无穷大共 {many} 个",
    ),
    "unseen": (
        "with these inputs this mistake would not show: {did}; to show it takes {needs}",
        "用这组输入看不出这种错误：{did}；要看出来，需要{needs}",
    ),
}


_VALUES: dict[str, tuple[str, str]] = {
    "per head": ("each head with its own block of W^O", "每个头只乘 W^O 的对应块"),
    "on values": ("on the values, before attention", "计算注意力之前就乘到值上"),
    "first corner": ("first corner, query 0 at key 0", "左上角，查询 0 对键 0"),
    "last corner": ("last corner, the last query at the last key", "右下角，最后的查询对最后的键"),
    "one seen": ("1 where seen, 0 where hidden", "可见处为 1，被遮蔽处为 0"),
    "one hidden": ("0 where seen, 1 where hidden", "可见处为 0，被遮蔽处为 1"),
    "fill": ("put in their place", "替换了原得分"),
    "add": ("added to them", "加到了原得分上"),
    "rescale": ("what was summed before", "已累加的部分"),
    "rescale values": ("the sum of values", "值的累加"),
    "rescale sum": ("the sum of powers", "指数之和"),
    "last": ("sums are", "各个累加值"),
    "last values": ("sum of values is", "值的累加"),
    "skipped": ("they are skipped", "它们被跳过"),
    "zeros": ("the padding behind them counts as keys with score 0", "其后的填充被当作得分为 0 的键"),
    "zero": ("0", " 0"),
    "unknown": ("whatever was in memory", "内存中原来的内容"),
}


def _details(recipe: Recipe, change: Change, language: Language) -> dict[str, Any]:
    """The values that the sentences name: the changed fields, in words where there are any."""
    details: dict[str, Any] = {"added": "", "source": ""}
    for field in change:
        value = getattr(recipe, field)
        details[field] = significant(value, 4) if isinstance(value, float) else value
        sized = isinstance(value, tuple) and isinstance(value[0], str)
        kind = value[0] if sized else value
        said = DETAILS.get((field, kind)) or (_VALUES.get(kind) if isinstance(kind, str) else None)
        words = said[language == "zh"] if said else kind
        details |= {"what": words, "size": value[1]} if sized else {field: words} if said else {}
    letters = _say(language, "between").join(field[-1].upper() for field in change if field[:2] in ("w_", "b_"))
    return details | {"letters": letters, "rate": f"{significant(100 * recipe.dropout, 2)}%"}


def _say(language: Language, key: str, **values: object) -> str:
    return filled(_SAID[key][language == "zh"], **values)


def _lines(diagnosis: Diagnosis, language: Language) -> Iterator[AnswerLine]:
    numbers = {"difference": diagnosis.difference, "tolerance": diagnosis.tolerance}
    for nonfinite in diagnosis.nonfinite:
        words = {**nonfinite._asdict(), "place": ", ".join(map(str, nonfinite.place))}
        yield AnswerLine("verdict", _say(language, "nonfinite", **words))
    if diagnosis.verdict in ("right", "unexplained"):
        yield AnswerLine("verdict", _say(language, diagnosis.verdict, **numbers))
    elif diagnosis.verdict == "ambiguous":
        equal = [e for e in diagnosis.explanations if e.confidence == "ambiguous"]
        yield AnswerLine("verdict", _say(language, "ambiguous", count=len(equal)))
        for index, explanation in enumerate(equal):
            if index:
                yield AnswerLine("note", "  " + _say(language, "or").strip(" ，"))
            yield from _explained(explanation, language, apart=True)
    else:
        best = diagnosis.explanations[0]
        yield AnswerLine("verdict", _say(language, "mistake" if len(best.mistakes) == 1 else "mistakes"))
        yield from _explained(best, language)
        sure = {"residual": best.residual, "tolerance": best.tolerance, "difference": diagnosis.difference}
        fits = all(mistake.evidence == "numbers" for mistake in best.candidate.mistakes)
        yield AnswerLine("note", _say(language, best.confidence if fits else "no fit", **sure))
        for doubt in best.doubts:
            yield AnswerLine("note", _say(language, "because", why=said(doubt, language)))
    if diagnosis.explanations and diagnosis.convention == "columns":
        yield AnswerLine("note", _say(language, "columns"))
    less = [e for e in diagnosis.explanations[1:] if e.confidence != "ambiguous"]
    if less:
        names = _say(language, "between").join(" + ".join(e.mistakes) for e in less[:5])
        yield AnswerLine("note", _say(language, "less well", names=names))
    if diagnosis.first_difference is not None:
        key = "first" if diagnosis.first_difference.head is not None else "first joined"
        place = diagnosis.first_difference._asdict()
        if diagnosis.tokens is not None:
            place["query"] = f"{place['query']} ({diagnosis.tokens[place['query']].strip()})"
        yield AnswerLine("note", _say(language, key, **place))
    if diagnosis.known:
        yield AnswerLine("known", _say(language, "known"))
    for fact in diagnosis.known:
        yield AnswerLine("known", f"  {said(fact, language)}")
    for unseen in diagnosis.unseen:
        yield AnswerLine("note", _say(language, "unseen", did=unseen.did(language)[0], needs=unseen.needs(language)[0]))
    if not diagnosis.looked.everything:
        counts = {"batches": len(diagnosis.looked.batches), "queries": len(diagnosis.looked.queries)}
        yield AnswerLine("note", _say(language, "sampled", **counts))


def _explained(explanation: MistakeExplanation, language: Language, *, apart: bool = False) -> Iterator[AnswerLine]:
    for index, (did, mend) in enumerate(zip(explanation.did(language), explanation.mend(language), strict=True)):
        yield AnswerLine("did", f"  {_say(language, 'and') if index else ''}{did}")
        yield AnswerLine("mend", _say(language, "change", mend=mend))
    if apart:
        needs = _say(language, "also").join(explanation.needs(language))
        yield AnswerLine("needs", _say(language, "tell", needs=needs))


def _plain(x: Any) -> Any:
    """NaN and infinity, which JSON lacks, as None."""
    return None if isinstance(x, float) and not isfinite(x) else x
