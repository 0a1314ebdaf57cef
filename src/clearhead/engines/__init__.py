"""Chooses an engine and says why: the CPU's engines first, the fastest before the others, then the GPU's."""

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

from clearhead.core.axes import Array
from clearhead.core.call import Call
from clearhead.core.observations import check_room
from clearhead.core.problem import Problem
from clearhead.core.state import State
from clearhead.core.statistics import Wanted
from clearhead.engines import native
from clearhead.engines.base import Engine
from clearhead.errors import EngineError, unknown
from clearhead.loading import load

_NATIVE = cast("Engine", native)
NAMES = ("native", "portable", "triton")
_HINT = "leave `engine` out, or unset CLEARHEAD_ENGINE, to let clearhead choose."
EXPERIMENTAL = {"triton": "its kernels are tested in Triton's interpreter and compiled, and have never run on a GPU."}


@dataclass(frozen=True, slots=True)
class Plan:
    """The engine that a call uses, and the reasons why each faster one cannot run."""

    engine: str
    reasons: dict[str, list[str]]

    @property
    def experimental(self) -> str:
        """Why the chosen engine counts as experimental, as a sentence, or "" if it does not."""
        return EXPERIMENTAL.get(self.engine, "")

    def __str__(self) -> str:
        lines = [f"engine: {self.engine}", *([f"experimental: {self.experimental}"] if self.experimental else [])]
        lines += [f"not {name}: {reason}" for name, reasons in self.reasons.items() for reason in reasons]
        return "\n".join(lines)


@cache
def get(name: str) -> Engine:
    """The engine of that name, imported on first use."""
    return cast("Engine", load(f"engines.{name}"))


def chosen(problem: Problem, name: str | None = None) -> Engine:
    """The engine that `choose` names."""
    return _NATIVE if name is None and native.usable(problem) else get(choose(problem, name).engine)


def choose(problem: Problem, name: str | None = None, want: Wanted | None = None, what: str = "") -> Plan:
    """Choose the first engine with no reason against it, or check the named one.

    name    an engine's name; None takes the environment variable CLEARHEAD_ENGINE, or chooses
    want    the statistics that the engine must compute
    what    what else it must compute, such as "gradients" or "effects"

    Raises UnknownNameError for an unknown name, and EngineError with every reason if no engine can run the problem.
    """
    name = os.environ.get("CLEARHEAD_ENGINE") or None if name is None else name
    if name is not None and not (isinstance(name, str) and name in NAMES):
        raise unknown("engine", name, NAMES)
    reasons: dict[str, list[str]] = {}
    order = NAMES if problem.device == "cpu" else ("native", "triton", "portable")  # Triton is slow on the CPU
    for candidate in order if name is None else (name,):
        engine = get(candidate)
        against = [*engine.reasons_not(problem), *([] if want is None else undeclared(engine, want))]
        if not against and what and not hasattr(engine, "others" if what == "effects" else what):
            against = [f"the {candidate} engine has no {what}."]
        if not against:
            if candidate == "portable" and "native" in reasons and problem.device == "cpu":
                _tell(native.missing())
            return Plan(candidate, reasons)
        reasons[candidate] = against
    shown = "; ".join(f"{engine}: {' '.join(against)}" for engine, against in reasons.items())
    what = "no engine can run this problem." if name is None else f"the engine {name} cannot run this problem."
    raise EngineError(f"{what} {shown}", _HINT if name else "")


@cache
def _tell(missing: str) -> None:
    """Log, once per process, why the compiled kernel cannot run, since users would otherwise only notice a slow call.

    It uses `logging`, not `warnings`, since the calling program is not at fault and gets the same answers.
    """
    if missing:
        import logging

        words = "clearhead computes with NumPy, which is slower and gives the same answers: %s"
        logging.getLogger("clearhead").warning(words, missing)


def undeclared(engine: Engine, want: Wanted) -> list[str]:
    """Say which requested statistics an engine does not compute, as one sentence; [] if it computes all."""
    missing = [name for name in want.names() if name not in engine.STATISTICS]
    return [f"it does not compute {', '.join(missing)}."] if missing else []


def able(engine: Engine, problem: Problem, want: Wanted, name: str | None = None) -> Engine:
    """Return this engine if it computes all requested statistics, else the first that does. Raises EngineError."""
    return engine if not undeclared(engine, want) else get(choose(problem, name, want).engine)


def state_of(engine: Engine, call: Call) -> State:
    """The rows' states, from a row pass."""
    answers = engine.rows(call.with_values(None), Wanted(logsumexp=True))
    return State(*(answers[name] for name in State._fields))


def answer(engine: Engine, call: Call, want: Wanted, state: State | None = None) -> dict[str, Array]:
    """Compute all requested statistics, by array name, in the fewest passes over the keys.

    Give the rows' state if it is known, as this engine's row pass computes it, bit for bit; if it must be computed, the
    answers include it. A row pass that is needed anyway may answer `received` too. Raises SizeError if the answers are
    larger than memory.
    """
    problem, v = call.problem, call.v
    if want.output != (v is not None):
        want = replace(want, output=v is not None)
    check_room(problem, want, 0 if v is None else v.shape[-1])
    columns = want.columns()
    computed = state is None and (want.logsumexp or bool(columns))
    first = want if want.logsumexp == computed else replace(want, logsumexp=computed)
    results: dict[str, Array] = {}
    if first.rows():
        results.update(engine.rows(call, first))
    if columns and "received" in results:  # the row pass has answered it too
        want = replace(want, received=False)
        columns = want.columns()
    if columns:
        known = State(results["largest"], results["log_sum"]) if state is None else state
        results.update(engine.columns(call, known, want))
    return results
