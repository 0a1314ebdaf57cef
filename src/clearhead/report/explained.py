"""Prints `HeadSteps`: the answer, then tokens, the layer's steps, one head's weights, one token's sum.

The answer is what the chosen token attends to, what follows it, and what heads do.
"""

from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.text import Text

from clearhead.core.axes import Array, named
from clearhead.digits import fixed, percent, signed
from clearhead.explaining.head_steps import HeadSteps, attending, following, kinds_of, sizes_of
from clearhead.explaining.rerun import HeadEffect
from clearhead.explaining.texts import Split, parts_of, token_name
from clearhead.models.model import SHIPPED
from clearhead.models.protocol import LanguageModel, layer_numbers
from clearhead.models.tokenizer import Reading
from clearhead.report.cells import columns, figure, label, listed, note, title, wrapped
from clearhead.report.console import sections
from clearhead.report.heat import matrix
from clearhead.report.streams import printable, shown, spelled
from clearhead.tables import aligned, bar
from clearhead.words import Language, formula, say

_SHOWN_VALUES = 4
_SHOWN_KEYS = 8


def show(console: Console, seen: HeadSteps, language: Language) -> None:
    """Print everything, the answer first."""
    rest = (part(console, seen, language) for part in (_opening, _layer, _weights, _arithmetic))
    sections(console, [answer(seen, language), *rest])


def show_opening(console: Console, seen: HeadSteps, language: Language) -> None:
    """Print the answer alone."""
    sections(console, [answer(seen, language), iter([more_note(seen, language)])])


def more_note(seen: HeadSteps | HeadEffect, language: Language) -> Text:
    """Say which options show more, and of which head --steps shows the steps."""
    return note(say(language, "why more", head=f"{seen.layer}.{seen.head}"))


def answer(seen: HeadSteps, language: Language) -> Iterator[Text]:
    """Say what the token attends to, what follows it, and what heads do."""
    yield title(shown(attending(seen, language)))
    if "sinks" in seen.run.rules:
        yield note(say(language, "sink takes", share=percent(max(0.0, 1 - float(seen.row.weights.sum())))))
    if seen.after:
        yield Text()
        yield title(shown(following(seen, language)))
        yield from (share_line(choice.text, choice.probability) for choice in seen.after)
    yield from _heads(seen, language)


def share_line(token: str, share: float) -> Text:
    """Write a possible next token, its probability and a bar."""
    return columns((0, -8, 0), [f"  {listed(token)}", f" {percent(share)}", f"  {bar(share, 24)}"])


def _heads(seen: HeadSteps, language: Language) -> Iterator[Text]:
    kinds = kinds_of(seen)
    if not kinds:
        return
    yield Text()
    yield title(say(language, "what heads do"))
    if 2 * seen.sinks >= seen.entropy.size:
        yield note("  " + say(language, "resting", sinks=seen.sinks, heads=seen.entropy.size))
    for head, more in kinds:
        assert head.caption is not None
        facts = {"layer": head.layer, "head": head.head, "caption": head.caption.said[language]}
        line = Text("  " + say(language, "head caption", **facts))
        yield line.append(say(language, "more such heads", count=more), style="dim") if more else line


def about(model: LanguageModel, language: Language, strange: bool = False) -> Iterator[Text]:  # noqa: FBT001
    """Write the model's name and sizes, and what the shipped model is for; `strange`: the text is no rhyme."""
    key, sizes = sizes_of(model)
    yield title(say(language, key, name=model.name, **sizes))
    if model.name == SHIPPED:
        yield note(say(language, "why no rhyme" if strange else "illustration"))


def split_note(split: Split | None, language: Language) -> Iterator[Text]:
    """Explain characters that the tokenizer split into bytes, if there are any."""
    if split:
        safe = split._replace(first=printable(split.first), character=printable(split.character))
        yield note(say(language, "split", **safe._asdict()))


def opening(console: Console, model: LanguageModel, read: Reading, language: Language) -> Iterator[Text]:
    """Write the model, and the text as its tokens."""
    yield from about(model, language)
    yield Text()
    names, split = parts_of(read.tokens, read.text)
    forms = ["({})" if token.template else "{}" for token in read.tokens]
    words = [f"{i} {form.format(spelled(name))}   " for i, (name, form) in enumerate(zip(names, forms, strict=True))]
    yield from wrapped(console, say(language, "tokens") + "  ", words)
    if any(token.template for token in read.tokens):
        yield note(say(language, "template"))
    if read.dated:
        yield note(say(language, "dated"))
    yield from split_note(split, language)


def _opening(console: Console, seen: HeadSteps, language: Language) -> Iterator[Text]:
    yield from opening(console, seen.model, Reading(seen.text, seen.tokens, []), language)
    if seen.generated:
        yield note(say(language, "generated", count=seen.generated))


def _layer(_: Console, seen: HeadSteps, language: Language) -> Iterator[Text]:
    yield title(say(language, "layer", layer=seen.layer, heads=seen.model.config.heads))
    for step in seen.steps:
        yield columns((40, 0), [f"  {formula(language, step.formula)}", named(step.shape, step.axes)])
        yield note(f"      {say(language, step.words)}")


def _weights(console: Console, seen: HeadSteps, language: Language) -> Iterator[Text]:
    shape = named(seen.trace.weights.shape, ("queries", "keys"))
    yield title(f"{say(language, 'head', head=seen.head, layer=seen.layer)}  {shape}")
    visible = int((~np.isneginf(seen.row.masked)).sum())
    entropy = float(seen.entropy[layer_numbers(seen.model).index(seen.layer), seen.head])
    facts = {"token": seen.token, "entropy": entropy, "most": float(np.log(max(1, visible)))}
    yield note(say(language, "sharpest" if seen.chosen[1] and seen.change is None else "entropy", **facts))
    if seen.change is not None:
        yield note(say(language, "chosen", token=seen.token, change=signed(seen.change)))
    names = parts_of(seen.tokens, seen.text).names
    masked = np.isneginf(seen.trace.masked)
    yield from matrix(console, seen.trace.weights, masked, names, names, language)
    sums = seen.trace.weights.sum(axis=-1)[~masked.all(axis=-1)]
    words = sum_words(language, sums, rows=True, sinks="sinks" in seen.run.rules)
    yield note(f"{say(language, 'axes')}{say(language, 'also')}{words}")


def sum_words(language: Language, sums: Array, *, rows: bool, sinks: bool = False) -> str:
    """Say what each query's weights sum to; `rows`: a query's weights are a row, not a column."""
    which = "rows" if rows else "columns"
    if sinks:
        return say(language, f"{which} sum sinks", low=float(sums.min(initial=1)), high=float(sums.max(initial=0)))
    return say(language, f"{which} sum", deviation=float(np.abs(sums - 1).max(initial=0)))


def _arithmetic(_: Console, seen: HeadSteps, language: Language) -> Iterator[Text]:
    row = seen.row
    yield title(say(language, "how", token=token_name(seen, seen.token)))
    width = row.contributions.shape[-1]
    count = min(_SHOWN_VALUES, width)
    d_k = seen.trace.q.shape[-1]
    plain = not {"softcap", "bias", "alibi_slopes"} & set(seen.run.rules)
    default = bool((abs(seen.trace.problem.scale * d_k**0.5 - 1) < 1e-12).all())
    scale = shown(f"q·k/√{d_k}" if default else "scale·q·k") if plain else "logit"
    heads = [f"  {say(language, 'key')}", "q·k", scale if len(scale) < 10 else "scaled", say(language, "weight")]
    widths, values = (14, -9, -10, -10, 0), say(language, "contribution", count=count, width=width)
    yield columns(widths, [*heads, f"  {values}"])
    visible = np.flatnonzero(~np.isneginf(row.masked))
    order = visible[np.argsort(-row.weights[visible], kind="stable")]
    for j in order[:_SHOWN_KEYS]:
        figures = figure(row.scores[j], 3, 9), figure(row.masked[j], 4, 10), figure(row.weights[j], 4, 10)
        yield columns(widths, [f"  {label(token_name(seen, j), 12)}", *figures, _values(row.contributions[j], count)])
    rest = order[_SHOWN_KEYS:]
    sums = [(say(language, "more", count=len(rest)), row.weights[rest].sum(), row.contributions[rest].sum(axis=0), "")]
    sums.append(("Σ = o", row.weights.sum(), row.output, "bold"))
    for name, weight, output, style in sums if len(rest) else sums[1:]:
        yield columns((33, -10, 0), [f"  {name}", figure(weight, 4, 10), _values(output, count)], style)
    yield note(say(language, "agree", difference=row.difference))
    yield note(say(language, "check", engine=seen.trace.engine, difference=seen.trace.difference))


def _values(row: Array, count: int) -> str:
    return "  " + aligned([-8] * count, [fixed(float(value), 4, 8) for value in row[:count]], " ")
