"""Words the verdict in English and Chinese: what their code did, how sure that is, and the line to change."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import Any, Literal

from clearhead.diagnosing.mistakes import Mistake, values
from clearhead.diagnosing.recipe import Change, Recipe
from clearhead.digits import significant
from clearhead.words import Language, counted, filled, read_language, table

Outcome = Literal["right", "mistake", "ambiguous", "unexplained"]
Confidence = Literal["sure", "likely", "ambiguous"]
BUDGET = 2**21  # the most weights that are compared
Reason = tuple[str, Mapping[str, Any]]  # a piece of evidence: a key in words/diagnose.toml, and the sentence's values
AnswerLine = tuple[str, str]  # its kind (verdict, did, mend, needs, known or note) and its text


@dataclass(frozen=True, eq=False, slots=True)
class MistakeExplanation:
    """One possible explanation: one mistake or two, and how far the numbers that they give lie from theirs."""

    entries: tuple[Mistake, ...]
    changes: tuple[Change, ...]  # of the recipe, one for each of them
    recipe: Recipe
    residual: float = inf
    tolerance: float = 0.0
    confidence: Confidence = "ambiguous"
    alike: tuple["MistakeExplanation", ...] = ()  # the same mistakes with other details that fit equally well
    doubts: tuple[Reason, ...] = ()  # why it is only likely

    def __repr__(self) -> str:
        return f"Explanation({' + '.join(self.mistakes)}, residual {significant(self.residual, 2)}, {self.confidence})"

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Their names in the catalogue."""
        return tuple(mistake.name for mistake in self.entries)

    @property
    def solved(self) -> bool:
        """Was the number that the mask fills in solved from theirs?"""
        return any(None in change.values() for change in self.changes)

    @property
    def details(self) -> dict[str, Any]:
        """The fields of the textbook's recipe that were changed, such as a block's size or a fill."""
        fields = {field for change in self.changes for field in change}
        return {field: self.recipe[field] for field in sorted(fields)}

    def did(self, language: Language = "en") -> list[str]:
        """Say what their code did, one sentence per mistake."""
        return self.words("did", language)

    def mend(self, language: Language = "en") -> list[str]:
        """Say which line to change, one sentence per mistake."""
        return self.words("mend", language)

    def words(self, what: Literal["did", "mend", "needs"], language: Language) -> list[str]:
        """One sentence per mistake: what their code did, the line to change, or what inputs would show the mistake."""
        read_language(language)
        fitting, sentences = (self, *self.alike), []
        for index, mistake in enumerate(self.entries):
            details = [_details(one.recipe, one.changes[index], language) for one in fitting]
            different = dict.fromkeys(getattr(mistake, what)[language].format(**each) for each in details)
            sentences.append(_say(language, "or").join(different))
        return sentences

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain numbers and words."""
        known: dict[str, Any] = {"mistakes": self.mistakes, "confidence": self.confidence}
        known |= {"residual": _plain(self.residual), "tolerance": _plain(self.tolerance)}
        known["details"] = {field: _plain(value) for field, value in self.details.items()}
        known |= {"did": self.did(), "mend": self.mend(), "needs": self.words("needs", "en")}
        return known | {"doubts": [said(*doubt, "en") for doubt in self.doubts]}


@dataclass(frozen=True, eq=False, slots=True)
class Diagnosis:
    """The verdict: right, a mistake, several that fit equally (ambiguous), or no known one (unexplained).

    Prints as an answer in English; `told("zh")` is the answer in Chinese.
    """

    verdict: Outcome
    explanations: tuple[MistakeExplanation, ...]  # those that fit, best first
    difference: float  # the largest difference between theirs and the right numbers
    tolerance: float  # the largest difference that rounding allows
    first_difference: Mapping[str, Any]  # batch, head (unless heads are joined), query, column, theirs, right
    looked: Mapping[str, Any]  # the batch entries, heads and queries that were compared, and whether these are all
    known: tuple[Reason, ...] = ()  # what is known if nothing explains the numbers
    convention: str = "rows"

    def __str__(self) -> str:
        return self.told()

    def __repr__(self) -> str:
        named = ", ".join(" + ".join(e.mistakes) for e in self.explanations)
        return f"Diagnosis({self.verdict}{': ' if named else ''}{named})"

    def told(self, language: Language = "en") -> str:
        """The whole answer as text, "en" or "zh". Raises RuleError for another language."""
        return "\n".join(text for _, text in self.lines(language))

    def lines(self, language: Language = "en") -> Iterator[AnswerLine]:
        """The answer line by line. Raises RuleError for another language."""
        read_language(language)

        say = partial(_say, language)
        if not self.looked["everything"]:
            sizes = {**self.looked, "budget": BUDGET}
            sizes |= {name: len(self.looked[name]) for name in ("queries", "batches")}
            entries = say("sampled entries", **sizes) if sizes["all_batches"] > sizes["batches"] else ""
            yield "note", say("sampled", **sizes, entries=entries)
        yield from _verdict(self, language)
        if self.explanations and self.convention == "columns":
            yield "note", say("columns")
        if less := [" + ".join(e.mistakes) for e in self.explanations[1:] if e.confidence != "ambiguous"]:
            yield "note", say("less well", names=say("between").join(less[:5]))
        if place := self.first_difference:
            yield "note", say("first" if "head" in place else "first joined", **place)
        if self.known:
            yield "known", say("known")
        for fact in self.known:
            yield "known", f"  {said(*fact, language)}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain numbers and words."""
        return {
            "verdict": self.verdict,
            "explanations": [e.to_json() for e in self.explanations],
            "largest_difference": _plain(self.difference),
            "tolerance": _plain(self.tolerance),
            "first_difference": {k: _plain(v) for k, v in self.first_difference.items()} or None,
            "looked_at": self.looked,
            "known": [{"what": key, **{k: _plain(x) for k, x in values.items()}} for key, values in self.known],
        }


def _details(recipe: Recipe, change: Change, language: Language) -> dict[str, Any]:
    """The values of the sentences' placeholders: the changed fields, in words if values.toml has them."""
    details: dict[str, Any] = {}
    for field in change:
        value = recipe[field]
        words = values().get(field, {}).get(str(value))
        words = {language: words} if isinstance(words, str) else words
        details[field] = words[language] if words else significant(value, 4) if isinstance(value, float) else value
    letters = _say(language, "between").join(field[-1].upper() for field in change if field[:2] in ("w_", "b_"))
    return details | {"letters": letters}


def _say(language: Language, key: str, **values: object) -> str:
    return filled(table("diagnose")[key][language], **values)


def said(key: str, values: Mapping[str, Any], language: Language) -> str:
    """Write a reason as a sentence."""
    filled_in = {"count": 0, "rows": 0, **values}
    if "names" in values:
        filled_in["names"] = _say(language, "between").join(values["names"])
    filled_in |= {"numbers": counted(filled_in["count"], "number"), "in_rows": counted(filled_in["rows"], "row")}
    return _say(language, key, **filled_in)


def _verdict(diagnosis: Diagnosis, language: Language) -> Iterator[AnswerLine]:
    """Yield the verdict's lines: right, or the mistake and how sure that is."""
    equal = [e for e in diagnosis.explanations if e.confidence == "ambiguous"] or diagnosis.explanations[:1]
    pair = diagnosis.verdict == "mistake" and len(equal[0].entries) > 1
    numbers = {"difference": diagnosis.difference, "tolerance": diagnosis.tolerance, "count": len(equal)}
    yield "verdict", _say(language, "mistakes" if pair else diagnosis.verdict, **numbers)
    for index, explanation in enumerate(equal):
        if index:
            yield "note", "  " + _say(language, "or").strip(" ，")
        lines = zip(explanation.did(language), explanation.mend(language), strict=True)
        for place, (did, mend) in enumerate(lines):
            yield "did", f"  {_say(language, 'and') if place else ''}{did}"
            yield "mend", _say(language, "change", mend=mend)
        if diagnosis.verdict == "ambiguous":
            needs = _say(language, "also").join(explanation.words("needs", language))
            yield "needs", _say(language, "tell", needs=needs)
        else:
            rounded = any(mistake.evidence == "rounding" for mistake in explanation.entries)
            numbers |= {"residual": explanation.residual, "tolerance": explanation.tolerance}
            yield "note", _say(language, "no fit" if rounded else explanation.confidence, **numbers)
        for doubt in explanation.doubts:
            yield "note", _say(language, "because", why=said(*doubt, language))


def _plain(x: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return None if isinstance(x, float) and not isfinite(x) else x
