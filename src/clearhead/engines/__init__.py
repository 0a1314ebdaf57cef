"""The engines, the CPU's from the fastest on and then the GPU's; the choice among them, and its reasons."""

import os
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import cast

from clearhead.axes import Array
from clearhead.engines.base import Engine
from clearhead.errors import EngineError, unknown
from clearhead.observations import Wanted, check_room
from clearhead.problem import Problem

NAMES = ("native", "portable", "triton")


@dataclass(frozen=True, slots=True)
class Plan:
    """Which engine a call takes, and why each faster one can't."""

    engine: str
    reasons: dict[str, list[str]]

    def __str__(self) -> str:
        lines = [f"engine: {self.engine}"]
        lines += [f"not {name}: {reason}" for name, reasons in self.reasons.items() for reason in reasons]
        return "\n".join(lines)


@cache
def get(name: str) -> Engine:
    """The engine of that name, loaded when asked for."""
    return cast("Engine", import_module(f"clearhead.engines.{name}"))


def check_name(name: str | None) -> None:
    """Raise UnknownNameError for what is no engine's name; None leaves the choice to `choose`."""
    if name is not None and not (isinstance(name, str) and name in NAMES):
        raise unknown("engine", name, NAMES)


def choose(problem: Problem, name: str | None = None) -> Plan:
    """The first engine with no reason against it, or the named one; EngineError with every reason where none can.

    CLEARHEAD_ENGINE names one for a whole process.
    """
    name = os.environ.get("CLEARHEAD_ENGINE") or None if name is None else name
    check_name(name)
    reasons: dict[str, list[str]] = {}
    for candidate in NAMES if name is None else (name,):
        against = get(candidate).reasons_not(problem)
        if not against:
            return Plan(candidate, reasons)
        reasons[candidate] = against
    told = "; ".join(f"{engine}: {' '.join(against)}" for engine, against in reasons.items())
    raise EngineError(f"no engine can run this problem. {told}", "leave `engine` out to let clearhead choose.")


def choose_for_gradients(problem: Problem, name: str | None = None) -> Plan:
    """As `choose`, among the engines that answer for gradients; EngineError where the named one does not."""
    name = os.environ.get("CLEARHEAD_ENGINE") or None if name is None else name
    plan = choose(problem, name)
    if hasattr(get(plan.engine), "gradients"):
        return plan
    if name is not None:
        raise EngineError(f"the {name} engine has no gradients.", "leave `engine` out to let clearhead choose.")
    reasons = {**plan.reasons, plan.engine: ["it has no gradients."]}
    return replace(choose(problem, "portable"), reasons=reasons)


def answer(
    engine: Engine, problem: Problem, q: Array, k: Array, v: Array | None, want: Wanted, logsumexp: Array | None = None
) -> dict[str, Array]:
    """Everything wanted, by name, in the fewest passes; the log-sum-exp too where it was computed and not known.

    A known one has the bits that this engine's row pass gives: a row pass that is needed anyway answers `received` too.
    Raises SizeError where the answers are larger than memory.
    """
    check_room(problem, replace(want, output=v is not None), 0 if v is None else v.shape[-1])
    needed = want.logsumexp or want.columns()
    first = replace(want, output=v is not None, logsumexp=needed and logsumexp is None)
    found: dict[str, Array] = {}
    if first.rows():
        found.update(engine.rows(problem, q, k, v, first))
    want = replace(want, received=want.received and "received" not in found)
    if want.columns():
        found.update(engine.columns(problem, q, k, found["logsumexp"] if logsumexp is None else logsumexp, want))
    return found
