"""What cutting edges really changes: the model is run again without each, and the truth stands beside the estimate."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from clearhead.changing.change import change
from clearhead.changing.edits import cut
from clearhead.core.effects import spearman
from clearhead.errors import DtypeError, RuleError, shown
from clearhead.watching.effects import Edge, Edges
from clearhead.watching.spans import SpanEdge
from clearhead.words import Language, say

_HINT = "seen.verify(seen.strongest(20), lambda: logit_of(model(ids)))"


class VerifiedEdge(NamedTuple):
    """One edge of one head, what cutting it was estimated to change, and what it does."""

    layer: str
    head: int
    query: int  # the number of the token, or of the span
    key: int
    estimate: float
    truth: float


class Verified(Edges[VerifiedEdge]):
    """Edges with estimate and truth; `str` makes a table, with the tokens where known, and their rank correlation."""

    about, bars = "verified table", "truth"
    columns: ClassVar = {"head": 4, "query": 6, "key": 6, "estimate": 11, "truth": 11}

    @property
    def agreement(self) -> float | None:
        """Spearman's rank correlation of estimates and truth; None for fewer than three edges or all equal ones."""
        return spearman([edge.estimate for edge in self], [edge.truth for edge in self])

    def _notes(self, language: Language) -> list[str]:
        return [] if self.agreement is None else [say(language, "verified rank", agreement=self.agreement)]


def verified(model: Any, edges: Any, run: Callable[[], Any], batch: int) -> Verified:
    """Run the model once as it is and once without each edge; `seen.verify` says what is raised."""
    if not isinstance(edges, (list, tuple)) or not all(isinstance(edge, (Edge, SpanEdge)) for edge in edges):
        raise DtypeError(f"edges is {shown(edges)}: expected what seen.strongest gives.", _HINT)
    if not callable(run):
        raise DtypeError(f"run is {shown(run)}: expected a function that runs the model and returns a number.", _HINT)
    if batch > 1:
        raise RuleError(
            f"{batch} texts were watched together: an edge is cut in all of a batch, and its effect is one text's.",
            "watch one text.",
        )
    before, result = _number(run), []
    for edge in edges:
        whole = (edge.queries, edge.keys) if isinstance(edge, SpanEdge) else ((edge.query,), (edge.key,))
        without = cut(queries=whole[0], keys=whole[1], layers=[edge.layer], heads=[edge.head], rest=edge.rest)
        with change(model, without):
            after = _number(run)
        result.append(VerifiedEdge(edge.layer, edge.head, edge.query, edge.key, edge.value, after - before))
    return Verified(result, edges.tokens if isinstance(edges, Edges) else ())


def _number(run: Callable[[], Any]) -> float:
    import torch

    with torch.no_grad():
        inputs = run()
    try:
        return float(inputs)
    except (TypeError, ValueError, RuntimeError):
        raise DtypeError(f"run returned {type(inputs).__name__}: expected one number.", _HINT) from None
