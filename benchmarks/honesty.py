"""How honest is `diagnose`? Mistakes that no entry describes, and every entry's own mistake with the entry taken out.

    python -m benchmarks.honesty [--only unlisted,leave-one-out,right] [--sizes 0,1,2,3] [--every N] [--seed S]

An answer is right where its claim goes on to hold: the same code on two other inputs, one of another length, is
explained by the same entries with the same sizes. Prints a table of answers. Right programs are tried as well.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import clearhead as ch
from benchmarks import right_programs, unlisted_rules
from benchmarks.unlisted import PLAIN, Case, Code
from benchmarks.unlisted_layers import LAYER
from clearhead.diagnosing import search
from clearhead.diagnosing.inputs import layer_inputs, plain_inputs
from clearhead.diagnosing.mistakes import mistakes
from clearhead.diagnosing.recipe import RIGHT, Change, Diagnosed, Rotary, Selection, changed
from clearhead.diagnosing.verdict import Diagnosis, MistakeExplanation
from clearhead.diagnosing.workings import Workings
from clearhead.textbook import case_file

KINDS: dict[str, dict[str, Code]] = {"plain": PLAIN, "layer": LAYER} | {
    name.lower(): getattr(unlisted_rules, name)
    for name in (
        *("CAUSAL", "DECODE", "PADDING", "MASK", "WINDOW", "BIAS", "ALIBI", "SOFTCAP", "SINKS", "GROUPED"),
        *("ROTARY", "SEGMENTS"),
    )
}
OTHERS = ("uneven", "blind", "scaled", "spans", "query_lengths")  # more rules, for leaving entries out
SIZES = ((2, 4, 48, 16), (2, 2, 21, 8), (1, 3, 70, 32), (1, 2, 12, 4))  # batch, heads, tokens, d
ANSWERS = ("right", "named", "wrong and sure", "wrong and likely", "wrong and ambiguous", "unexplained")


def case(kind: str, size: tuple[int, int, int, int], rng: np.random.Generator) -> Case:
    """Random inputs of a kind, with its rules."""
    batch, heads, n, d = size
    m, kv_heads = n, heads
    rules: dict[str, Any] = {}
    if kind == "layer":
        width = heads * d
        x = rng.standard_normal((batch, 1, n, width)).astype(np.float32)
        for name in "qkvo":
            rules[f"w_{name}"] = (rng.standard_normal((width, width)) * 1.3 / width**0.5).astype(np.float32)
            rules[f"b_{name}"] = rng.standard_normal(width).astype(np.float32)
        return Case(x, x, x, rng, rules | {"num_heads": heads})
    if kind == "decode":
        n = 1
        rules |= {"causal": True, "query_offset": m - 1}
    if kind == "grouped":
        heads, kv_heads = 2 * max(2, heads), max(2, heads)
    if kind == "causal":
        rules["causal"] = True
    if kind == "padding":
        batch = max(2, batch)
        rules["kv_lengths"] = rng.integers(m // 2, m - 2, batch)
        rules["kv_lengths"][-1] -= len(set(rules["kv_lengths"].tolist())) == 1
    if kind == "mask":
        rules["mask"] = rng.random((batch, 1, n, m)) < 0.6
        rules["mask"][..., 0] = True
    if kind == "window":
        rules["window"] = (int(rng.integers(4, 9)), int(rng.integers(1, 4)))
    if kind == "bias":
        rules["bias"] = rng.standard_normal((heads, n, m)).astype(np.float32)
    if kind == "alibi":
        rules["alibi_slopes"] = 0.4 / np.arange(1, heads + 1)
    if kind == "softcap":
        rules["softcap"] = 1.5
    if kind == "sinks":
        rules["sinks"] = np.linspace(0.5, 1.5, heads)
    if kind == "rotary":
        rules["rotary"] = 100.0
    if kind == "uneven":
        m = n + 7
        rules |= {"causal": True, "query_offset": 7}
    if kind == "blind":
        rules |= {"causal": True, "query_offset": -3}
    if kind == "scaled":
        rules["scale"] = 0.31
    if kind == "spans":
        labels = rng.integers(-1, 4, (batch, n))
        rules["spans"] = labels, labels, rng.standard_normal((heads, 4, 4)).astype(np.float32) * 2
    if kind == "query_lengths":
        rules["query_lengths"] = rng.integers(n // 2, n - 2, batch)
    if kind == "segments":
        cuts = rng.integers(n // 4, n - n // 4, (batch, 1))
        rules["query_segments"] = rules["kv_segments"] = (np.arange(n) >= cuts).astype(int)
    shapes = ((batch, heads, n, d), (batch, kv_heads, m, d), (batch, kv_heads, m, d))
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return Case(q, k, v, rng, rules)


def diagnosed(c: Case, theirs: Any) -> Diagnosis:
    theirs = np.asarray(theirs, np.float32)
    if "w_q" in c.rules:
        rest = {name: value for name, value in c.rules.items() if name[:2] != "w_"}
        w = [c.rules[f"w_{name}"] for name in "qkvo"]
        return ch.diagnose_layer(c.q[:, 0], *w, theirs, **rest)
    return ch.diagnose(c.q, c.k, c.v, theirs, **c.rules)


@contextmanager
def catalogue(entries: Any) -> Iterator[None]:
    """The search with other entries."""
    kept, chosen = search.mistakes, tuple(entries)
    search.mistakes = lambda: chosen
    try:
        yield
    finally:
        search.mistakes = kept


def sizes_of(explanation: MistakeExplanation) -> set[Any]:
    """The sizes that it names: of blocks, of tails."""
    return {
        value
        for e in (explanation.candidate, *explanation.alike)
        for c in e.changes
        for value in c.values()
        if isinstance(value, tuple)
    }


def holds(claim: MistakeExplanation, again: Callable[[int], tuple[Case, Any]]) -> bool:
    """Does the claim explain the same code on other inputs?"""
    if any(mistake.evidence != "numbers" for mistake in claim.candidate.mistakes):
        return False
    with catalogue(claim.candidate.mistakes):
        for shape in range(2):
            diagnosis = diagnosed(*again(shape))
            same = [e for e in diagnosis.explanations if set(e.mistakes) == set(claim.mistakes)]
            if diagnosis.verdict != "right" and not any(
                sizes_of(e) & sizes_of(claim) or not sizes_of(claim) for e in same
            ):
                return False
    return True


@dataclass(frozen=True)
class Outcome:
    """What diagnose said about one code on one input."""

    kind: str
    code: str
    size: int
    answer: str
    said: str
    seconds: float


def outcome(kind: str, name: str, index: int, code: Code, seed: int) -> Outcome:
    """Diagnose one code, and see whether the answer holds."""
    size = SIZES[index]
    rng = np.random.default_rng([seed, index])
    with np.errstate(all="ignore"):
        first = case(kind, size, rng)
        theirs = code(first)

        def again(shape: int) -> tuple[Case, Any]:
            batch, heads, n, d = size
            other = case(kind, (batch, heads, n + 5 * shape, d), rng)
            return other, code(other)

        began = time.perf_counter()
        diagnosis = diagnosed(first, theirs)
        seconds = time.perf_counter() - began
        return Outcome(kind, name, index, judged(diagnosis, again), repr(diagnosis), seconds)


def judged(diagnosis: Diagnosis, again: Callable[[int], tuple[Case, Any]]) -> str:
    """The column of the table that an answer belongs to."""
    if diagnosis.verdict in ("right", "unexplained"):
        return diagnosis.verdict
    shown = [e for e in diagnosis.explanations if e.confidence == "ambiguous"] or diagnosis.explanations[:1]
    if any(holds(e, again) for e in shown):
        return "named"
    return f"wrong and {diagnosis.explanations[0].confidence}"


def unlisted(sizes: list[int], every: int, seed: int) -> Iterator[Outcome]:
    named = [(kind, name, code) for kind, codes in KINDS.items() for name, code in codes.items()]
    for index in sizes:
        for kind, name, code in named[seed % every :: every]:
            try:
                yield outcome(kind, name, index, code, seed)
            except (ValueError, IndexError):  # this code needs a longer input
                continue


def inputs_of(c: Case) -> Diagnosed:
    """The case as diagnose reads it, before there is a result."""
    rules = dict(c.rules)
    if "w_q" in rules:
        layer = {name: c.q[:, 0] if name in ("x", "context") else rules.get(name) for name in case_file.LAYER}
        return layer_inputs(layer, np.zeros_like(c.q[:, 0]), rules["num_heads"], "rows", "output", None, {})
    base = rules.pop("rotary", None)
    theirs = np.zeros((*c.q.shape[:-1], c.v.shape[-1]), np.float32)
    return plain_inputs(c.q, c.k, c.v, theirs, "output", None if base is None else Rotary(base, False), rules)


def made(c: Case, change: Change) -> Any:
    """What code with this change of the textbook gives in float32."""
    inputs = inputs_of(c)
    if change.get("masking") in ("fill", "add"):
        change = {**change, "fill": -1.5}
    p = inputs.problem
    everything = Selection(tuple(range(p.heads)), tuple(range(p.queries)))
    theirs = Workings(inputs, np.dtype(np.float32)).answer(changed(RIGHT, change), everything)
    theirs = np.where(np.isfinite(theirs), theirs, np.nan).astype(np.float32)
    return theirs[:, 0] if inputs.merged else theirs


def left_out(sizes: list[int], every: int, seed: int) -> Iterator[Outcome]:
    """Each entry's own change on inputs that show it, with the entry taken out of the catalogue."""
    for index, mistake in product(sizes, mistakes()[seed % every :: every]):
        if mistake.evidence != "numbers":
            continue
        shown = 0
        for kind in (*KINDS, *OTHERS):
            variants = list(mistake.variants(inputs_of(case(kind, SIZES[index], np.random.default_rng(seed)))))
            for change in variants[:: max(1, len(variants) // 2)]:
                shown += 1
                if shown <= 6:
                    with catalogue(m for m in mistakes() if m is not mistake):
                        yield outcome(kind, mistake.name, index, partial(made, change=change), seed)


def right(_: list[int], every: int, seed: int) -> Iterator[Outcome]:
    """Right programs in four dtypes, with scores up to thousands: an answer other than "right" accuses one of them."""
    programs = list(right_programs.PROGRAMS.items())
    for number in range(5000 // every):
        rng = np.random.default_rng([seed, number])
        name, program = programs[number % len(programs)]
        q, k, v, rules = right_programs.activations(rng) if rng.random() < 0.1 else right_programs.draw(rng)
        theirs = program(right_programs.ready(q, k, v, rules), rng)
        began = time.perf_counter()
        verdict = ch.diagnose(q, k, v, theirs, **rules)
        answer = verdict.verdict if not verdict.explanations else f"wrong and {verdict.explanations[0].confidence}"
        said = f"{verdict!r}, {verdict.difference:.3g} off where {verdict.tolerance:.3g} is allowed, "
        said += f"rules {sorted(rules)}, q {tuple(q.shape)}, m {k.shape[2]}, rng [{seed}, {number}]"
        kind = str(q.dtype).removeprefix("torch.")
        yield Outcome(kind, name, 0, answer, said, time.perf_counter() - began)


def table(outcomes: list[Outcome]) -> str:
    kinds = list(dict.fromkeys(o.kind for o in outcomes))
    lines = ["| | " + " | ".join(ANSWERS) + " | all |", "| --- |" + " --- |" * (len(ANSWERS) + 1)]
    for kind in [*kinds, ""]:
        some = [o for o in outcomes if kind in ("", o.kind)]
        counts = Counter(o.answer for o in some)
        lines.append(f"| {kind or 'all'} | " + " | ".join(str(counts[a]) for a in ANSWERS) + f" | {len(some)} |")
    return "\n".join(lines)


def main(inputs: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.honesty", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="unlisted,leave-one-out,right")
    parser.add_argument("--sizes", default="0,1,2,3")
    parser.add_argument("--every", type=int, default=1, help="only each N-th mistake")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--verbose", action="store_true", help="each answer that is wrong or named")
    values = parser.parse_args(inputs)
    if values.kinds:
        for kind in list(KINDS):
            if kind not in values.kinds.split(","):
                del KINDS[kind]
    sizes = [int(size) for size in values.sizes.split(",")]
    for what, runs in (("unlisted", unlisted), ("leave-one-out", left_out), ("right", right)):
        if what not in values.only.split(","):
            continue
        outcomes = []
        for one in runs(sizes, values.every, values.seed):
            outcomes.append(one)
            if values.verbose and one.answer != "unexplained":
                print(
                    f"{one.answer:20} {one.kind:8} {one.code:40} {SIZES[one.size]} {one.said} {one.seconds:.1f} s",
                    flush=True,
                )
        print(f"\n{what}\n\n{table(outcomes)}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
