"""Runs the commands that teach with their own numbers, shapes, scale and learn, and prints their results."""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from clearhead.core.axes import Array
from clearhead.digits import fixed, percent, significant
from clearhead.errors import FileError
from clearhead.report.cells import columns, note, table, title
from clearhead.report.console import put
from clearhead.report.heat import pool
from clearhead.report.streams import console_of, deliver, spelled
from clearhead.tables import bar
from clearhead.textbook.costs import Product, layer_costs, read_sizes, sparse_patterns
from clearhead.textbook.why_scale import WIDTHS, WhyScale, why_scale
from clearhead.words import Language, formula, say

if TYPE_CHECKING:
    from clearhead.explaining.learning import Learning

_QUERIES = 1000  # queries that `clearhead scale` draws for each width
_WIDE = 11  # a column of the tables of scales
_LINES = 12  # lines of the table of training steps
_LEARNED = (-14, -9, 20, -10, -10, -10)  # widths of its columns


def shapes(options: argparse.Namespace) -> int:
    """Print a layer's steps in symbols and, if sizes are given, in numbers; then what they cost in all."""
    console, sizes = console_of(options), read_sizes(options.sizes)
    costs, patterns = layer_costs(sizes), dict[str, Array]()
    if options.sparse is not None:
        n = sizes.get("n")
        if n is None or "m" in sizes:
            raise FileError("--sparse needs self-attention over n tokens.", "clearhead shapes n=1024 --sparse 64")
        patterns = {name: seen for name, (_, seen) in sparse_patterns(n, options.sparse).items()}
    sparse = [{"pattern": name, "pairs": int(x.sum()), "share": float(x.mean())} for name, x in patterns.items()]
    deliver(options, lambda: costs | ({"sparse": sparse} if patterns else {}))
    if console is not None:
        put(console, _shapes(costs, options.lang))
        put(console, _sparse(costs, patterns, options.sparse, options.lang) if patterns else ())
    return 0


def _shapes(costs: dict[str, Any], language: Language) -> Iterator[Text]:
    for step in costs["steps"]:
        shapes = [f"({', '.join(map(str, step[key]))})" for key in ("shape", "shape_in_numbers")]
        numbers = shapes[1] if shapes[1] != shapes[0] else ""
        yield columns((28, 22, 0), [formula(language, step["formula"]), shapes[0], numbers], "bold")
        yield note("  " + say(language, "layer output" if step["name"] == "output" else step["name"]))
        if step["multiply_adds"] != ("0", 0):
            yield Text("  " + say(language, "work", work=_both(step["multiply_adds"])))
    yield Text()
    for name, count in costs["parameters"].items():
        yield columns((6, 0), [f"W^{name[-1].upper()}", say(language, "parameters", count=_both(count))])
    yield Text(say(language, "parameters in all", count=_both(costs["parameters_in_all"])))
    yield Text(say(language, "work in all", work=_both(costs["multiply_adds_in_all"])))
    yield note(say(language, "bytes of weights", size=_both(costs["bytes_of_weights"])))
    d_k, d_v = (step["shape_in_numbers"][-1] for step in costs["steps"] if step["name"] in ("q", "v"))
    if d_k != d_v and isinstance(d_k, int) and isinstance(d_v, int):
        yield note(say(language, "widths differ", d_k=d_k, d_v=d_v))


def _sparse(costs: dict[str, Any], patterns: dict[str, Array], width: int, language: Language) -> Iterator[Text]:
    """Compare sparse patterns with full attention: what they cost, and which pairs they compute."""
    pairs = patterns["full"].size
    works = [step["multiply_adds"][1] for step in costs["steps"] if step["name"] in ("scores", "heads")]
    names = [say(language, f"sparse {name}") for name in patterns]
    yield Text()
    yield title(say(language, "sparse", width=width, pairs=pairs))
    heads = ["", *(say(language, f"sparse {key}") for key in ("pairs", "share", "work"))]
    rows = []
    for name, seen in zip(names, patterns.values(), strict=True):
        work = "" if None in works else f"{sum(works) // pairs * int(seen.sum()):,}"
        rows.append([f"  {name}", f"{seen.sum():,}", percent(float(seen.mean())), work])
    yield from table((14, -16, -10, -26), heads, rows, "bold")
    yield Text()
    across = min(16, len(patterns["full"]))
    pictures = [pool(seen, across, across) > 0 for seen in patterns.values()]
    wide = [max(across, cell_len(name)) + 3 for name in names]
    yield columns((2, *wide), ["", *names])
    for lines in zip(*pictures, strict=True):
        yield columns((2, *wide), ["", *("".join("█" if seen else "·" for seen in line) for line in lines)])
    yield note(say(language, "sparse says"))


def _both(product: Product) -> str:
    """Write a product or a sum in symbols, and its value if that is known."""
    symbols, number = product
    return symbols if number is None else f"{symbols} = {number:,}"


def scale(options: argparse.Namespace) -> int:
    """Show with numbers why scores are divided by √d_k."""
    console, drawn = console_of(options), {"keys": options.keys, "queries": _QUERIES}
    result = why_scale(options.widths or WIDTHS, **drawn)
    deliver(options, lambda: result.to_json() | drawn)
    if console is not None:
        put(console, _scale(result, drawn, options.lang))
    return 0


def _scale(scale: WhyScale, drawn: dict[str, int], language: Language) -> Iterator[Text]:
    yield title(say(language, "why scale"))
    yield note(say(language, "variance grows"))
    yield Text()
    softmaxes = [say(language, key) for key in ("not divided", "divided")]
    yield columns((_WIDE, *[-2 * _WIDE] * 3), ["", say(language, "variance of"), *softmaxes])
    heads = ["d_k", "q·k", "/√d_k", "max a", "a(1-a)", "max a", "a(1-a)"]
    sides = np.stack([scale.largest, scale.slope], axis=-1)
    yield from _by_width(scale, heads, np.hstack([scale.variance, *sides.swapaxes(0, 1)]))
    yield note(say(language, "slope vanishes", **drawn))
    yield Text()
    yield title(say(language, "gradients"))
    yield columns((_WIDE, *[-2 * _WIDE] * 2), ["", *softmaxes])
    heads = ["d_k", *[say(language, key) for key in ("median", "largest gradient")] * 2]
    yield from _by_width(scale, heads, scale.gradient.reshape(len(scale.d_k), -1))
    yield note(say(language, "gradients say"))


def _by_width(scale: WhyScale, heads: Sequence[str], numbers: Array) -> Iterator[Text]:
    """Write a table with a row for each width, and an empty line."""
    rows = ([str(d_k), *(fixed(float(x), 4, 10) for x in row)] for d_k, row in zip(scale.d_k, numbers, strict=True))
    yield from table([-_WIDE] * len(heads), heads, rows, "bold")
    yield Text()


def learn(options: argparse.Namespace) -> int:
    """Show how a small model learns W^Q, W^K and W^V: the loss by step, then the last recorded step up to --step."""
    from clearhead.explaining.learning import learning

    console, run = console_of(options), learning()
    step = int(run.step[-1]) if options.step is None else options.step
    if not 0 <= step <= run.step[-1]:
        raise FileError(f"--step is {step}: expected 0 to {run.step[-1]}.", "clearhead learn --step 47")
    deliver(options, run.to_json, run.save)
    if console is not None:
        place, language = int(np.searchsorted(run.step, step, side="right")) - 1, options.lang
        put(console, _curve(run, place, language))
        put(console, _attended(run, place, language))
        put(console, [Text(), note(run.words("learn check", language)), note(say(language, "learn others"))])
    return 0


def _curve(run: "Learning", place: int, language: Language) -> Iterator[Text]:
    yield title(run.words("learn", language))
    yield note(run.words("learn says", language))
    yield Text()
    colon = say(language, "because")
    heads = [say(language, "learn step"), say(language, "learn loss"), "", "|∂/∂W_Q|", "|∂/∂W_K|", "|∂/∂W_V|"]
    yield columns(_LEARNED, heads, "bold")
    shown_steps = {*np.linspace(0, len(run.step) - 1, _LINES).round().astype(int).tolist(), place}
    for number in sorted(shown_steps):
        loss, mark = float(run.loss[number]), "→ " if number == place else ""
        cells = [f"{mark}{run.step[number]}", fixed(loss, 3, 8), f"  {bar(loss / float(run.loss.max()), 16)}"]
        slopes = [significant(float(x), 2) for x in run.gradient[number]]
        yield columns(_LEARNED, [*cells, *slopes], "bold" if mark else "")
    yield note(f"{say(language, 'learn loss')}{colon}{run.words('learn loss says', language)}")
    yield note(f"|∂/∂W|{colon}{run.words('learn gradient', language)}")


def _attended(run: "Learning", place: int, language: Language) -> Iterator[Text]:
    """Write what the last token attends to in each head, and what follows the text."""
    from clearhead.report.explained import share_line

    yield Text()
    yield title(run.words("learn attention", language))
    names = [spelled(token) for token in run.tokens]
    lead = max(cell_len(name) for name in names) + 2
    heads = [say(language, "learn column", head=head) for head in range(run.config.heads)]
    shares = [[f"{percent(x):>7} {bar(x, 14)}" for x in row] for row in run.weights[place, :, -1].T.tolist()]
    rows = ([f"  {name}", *row] for name, row in zip(names, shares, strict=True))
    yield from table((lead + 2, *[26] * len(heads)), ["", *heads], rows, "")
    yield Text()
    yield title(run.words("learn next", language))
    yield from (share_line(run.vocabulary[token], float(run.following[place, token])) for token in run.likeliest())
