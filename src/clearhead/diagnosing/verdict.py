"""The verdict in English and Chinese: what their code did, how sure that is, and the line to change."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from clearhead.diagnosing.mistakes import Mistake, values
from clearhead.diagnosing.recipe import Change, Recipe
from clearhead.digits import significant
from clearhead.view.names import Names
from clearhead.words import Language, counted, filled, read_language, table

Outcome = Literal["right", "mistake", "ambiguous", "unexplained"]
Confidence = Literal["sure", "likely", "ambiguous"]
BUDGET = 2**21  # the most weights that are compared


class Coverage(NamedTuple):
    """Which batch entries, heads and queries were compared, and whether that is everything."""

    batches: tuple[int, ...]
    heads: int
    queries: tuple[int, ...]
    everything: bool
    all_batches: int
    all_queries: int


class Reason(NamedTuple):
    """A piece of evidence: a key in words/diagnose.toml, and the values that the sentence names."""

    key: str
    values: Mapping[str, Any] = MappingProxyType({})


class WrongNumber(NamedTuple):
    """The first number that differs: where, theirs, and the right one; `head` is None where the heads are joined."""

    batch: int
    head: int | None
    query: int
    column: int
    theirs: float
    right: float


AnswerLine = tuple[str, str]  # its kind (verdict, did, mend, needs, known or note) and its text


@dataclass(frozen=True, eq=False, slots=True)
class MistakeExplanation:
    """What their code may have done: one mistake or two, and how far the numbers these give lie from theirs."""

    entries: tuple[Mistake, ...]
    changes: tuple[Change, ...]  # of the recipe, one for each of them
    recipe: Recipe
    residual: float = inf
    tolerance: float = 0.0
    confidence: Confidence = "ambiguous"
    alike: tuple["MistakeExplanation", ...] = ()  # the same mistakes with other details, which fit equally well
    doubts: tuple[Reason, ...] = ()  # why it is likely only

    def __repr__(self) -> str:
        return f"Explanation({' + '.join(self.mistakes)}, residual {significant(self.residual, 2)}, {self.confidence})"

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Their names in the catalogue."""
        return tuple(mistake.name for mistake in self.entries)

    @property
    def fits(self) -> bool:
        """Is the residual within what rounding allows?"""
        return self.residual <= self.tolerance

    @property
    def solved(self) -> bool:
        """Was the number that its mask fills with solved from theirs?"""
        return any(None in change.values() for change in self.changes)

    @property
    def details(self) -> dict[str, Any]:
        """The fields of the textbook's recipe that were changed, such as a block's size or a fill."""
        fields = {field for change in self.changes for field in change}
        return {field: self.recipe[field] for field in sorted(fields)}

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
        fitting, sentences = (self, *self.alike), []
        for index, mistake in enumerate(self.entries):
            details = [_details(one.recipe, one.changes[index], language) for one in fitting]
            different = dict.fromkeys(getattr(mistake, what)[language].format(**each) for each in details)
            sentences.append(_say(language, "or").join(different))
        return sentences

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain numbers and words."""
        numbers = {"residual": _plain(self.residual), "tolerance": _plain(self.tolerance)}
        details = {field: _plain(value) for field, value in self.details.items()}
        words = {"did": self.did(), "mend": self.mend(), "needs": self.needs()}
        doubts = [said(doubt, "en") for doubt in self.doubts]
        known = {"mistakes": self.mistakes, "confidence": self.confidence}
        return known | numbers | {"details": details} | words | {"doubts": doubts}


@dataclass(frozen=True, eq=False, slots=True)
class Diagnosis:
    """The verdict: right, a mistake, several that fit equally (ambiguous), or none of the known ones (unexplained).

    Prints as a colleague would say it; `told("zh")` says it in Chinese.
    """

    verdict: Outcome
    explanations: tuple[MistakeExplanation, ...]  # those that fit, the best first
    difference: float  # the largest between theirs and the right numbers
    tolerance: float  # what rounding allows
    first_difference: WrongNumber | None
    looked: Coverage
    unseen: tuple[MistakeExplanation, ...] = ()  # mistakes that these inputs cannot show
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
        return "\n".join(text for _, text in self.lines(language))

    def lines(self, language: Language = "en") -> Iterator[AnswerLine]:
        """The answer line by line. Raises RuleError for another language."""
        read_language(language)

        def line(kind: str, key: str, **values: object) -> AnswerLine:
            return kind, _say(language, key, **values)

        if not self.looked.everything:
            looked, sizes = self.looked, self.looked._asdict() | {"budget": BUDGET}
            sizes |= {"queries": len(looked.queries), "batches": len(looked.batches)}
            entries = _say(language, "sampled entries", **sizes) if looked.all_batches > len(looked.batches) else ""
            yield line("note", "sampled", **sizes, entries=entries)
        yield from _verdict(self, language)
        if self.explanations and self.convention == "columns":
            yield line("note", "columns")
        if less := [" + ".join(e.mistakes) for e in self.explanations[1:] if e.confidence != "ambiguous"]:
            yield line("note", "less well", names=_say(language, "between").join(less[:5]))
        if self.first_difference is not None:
            place = self.first_difference._asdict()
            if self.tokens is not None:
                place["query"] = f"{place['query']} ({self.tokens[place['query']].strip()})"
            yield line("note", "first joined" if place["head"] is None else "first", **place)
        if self.known:
            yield line("known", "known")
        for fact in self.known:
            yield "known", f"  {said(fact, language)}"
        for unseen in self.unseen:
            yield line("note", "unseen", did=unseen.did(language)[0], needs=unseen.needs(language)[0])

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain numbers and words."""
        first = self.first_difference
        return {
            "verdict": self.verdict,
            "explanations": [e.to_json() for e in self.explanations],
            "largest_difference": _plain(self.difference),
            "tolerance": _plain(self.tolerance),
            "first_difference": first and {k: _plain(v) for k, v in first._asdict().items()},
            "looked_at": self.looked._asdict(),
            "known": [{"what": fact.key, **{k: _plain(x) for k, x in fact.values.items()}} for fact in self.known],
            "unseen": [e.mistakes[0] for e in self.unseen],
        }


def _details(recipe: Recipe, change: Change, language: Language) -> dict[str, Any]:
    """The values that the sentences name: the changed fields, in words where there are any."""
    details: dict[str, Any] = {}
    for field in change:
        value = recipe[field]
        sized = isinstance(value, tuple) and isinstance(value[0], str) and isinstance(value[1], int)
        kind = value[0] if sized else value
        words = values().get(field, {}).get(str(kind))
        words = {language: words} if isinstance(words, str) else words
        said = words[language] if words else significant(kind, 4) if isinstance(kind, float) else kind
        details |= {"what": said, "size": value[1]} if sized else {field: said}
    letters = _say(language, "between").join(field[-1].upper() for field in change if field[:2] in ("w_", "b_"))
    return details | {"letters": letters}


def _say(language: Language, key: str, **values: object) -> str:
    return filled(table("diagnose")[key][language], **values)


def said(reason: Reason, language: Language) -> str:
    """A reason as a sentence."""
    values = {"count": 0, "rows": 0, **reason.values}
    if isinstance(values.get("names"), list):
        values["names"] = _say(language, "between").join(values["names"])
    values |= {"numbers": counted(values["count"], "number"), "in_rows": counted(values["rows"], "row")}
    return _say(language, reason.key, **values)


def _verdict(diagnosis: Diagnosis, language: Language) -> Iterator[AnswerLine]:
    """Whether it is right, and what explains it where it is not."""
    numbers = {"difference": diagnosis.difference, "tolerance": diagnosis.tolerance}
    if diagnosis.verdict in ("right", "unexplained"):
        exact = diagnosis.verdict == "right" and not diagnosis.difference
        yield "verdict", _say(language, "right, exactly" if exact else diagnosis.verdict, **numbers)
        return
    best = diagnosis.explanations[0]
    if diagnosis.verdict == "ambiguous":
        equal = [e for e in diagnosis.explanations if e.confidence == "ambiguous"]
        yield "verdict", _say(language, "ambiguous", count=len(equal))
        for index, explanation in enumerate(equal):
            if index:
                yield "note", "  " + _say(language, "or").strip(" ，")
            yield from _explained(explanation, language)
            needs = _say(language, "also").join(explanation.needs(language))
            yield "needs", _say(language, "tell", needs=needs)
        return
    yield "verdict", _say(language, "mistake" if len(best.mistakes) == 1 else "mistakes")
    yield from _explained(best, language)
    fits = all(mistake.evidence != "rounding" for mistake in best.entries)
    certain = best.confidence if best.residual else f"{best.confidence}, exactly"
    numbers |= {"residual": best.residual, "tolerance": best.tolerance}
    yield "note", _say(language, certain if fits else "no fit", **numbers)
    for doubt in best.doubts:
        yield "note", _say(language, "because", why=said(doubt, language))


def _explained(explanation: MistakeExplanation, language: Language) -> Iterator[AnswerLine]:
    for index, (did, mend) in enumerate(zip(explanation.did(language), explanation.mend(language), strict=True)):
        yield "did", f"  {_say(language, 'and') if index else ''}{did}"
        yield "mend", _say(language, "change", mend=mend)


def _plain(x: Any) -> Any:
    """NaN and infinity, which JSON lacks, as None."""
    return None if isinstance(x, float) and not isfinite(x) else x
