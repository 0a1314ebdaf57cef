"""The commands that teach with numbers of their own: shapes, scale, learn, and one head against several."""

import argparse
from typing import TYPE_CHECKING

from clearhead import arguments
from clearhead.errors import FileError
from clearhead.report.streams import console_of, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.diagnosing.claims import CheckedExample

_QUERIES = 1000  # that `clearhead scale` draws for each width
_STOPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of the slider on its page


def shapes(given: argparse.Namespace) -> int:
    """Print the shape and cost of every step of a layer."""
    from clearhead.textbook.layer_shapes import layer_shapes, read_sizes

    console = console_of(given)
    found = layer_shapes(read_sizes(given.sizes))
    if given.json is not None:
        write_json(given.json, found.to_json())
    if console is not None:
        from clearhead.report import shaped

        shaped.show(console, found, given.lang)
    return 0


def scale(given: argparse.Namespace) -> int:
    """Show with numbers why scores are divided by √d_k."""
    from clearhead.textbook.why_scale import WIDTHS, saturation, why_scale

    console = console_of(given)
    drawn = {"keys": given.keys, "queries": _QUERIES}
    widths = None if given.widths is None else arguments.numbers("--widths", given.widths)
    found, growing = why_scale(widths or WIDTHS, **drawn), saturation()
    if given.html is not None:
        why_scale(widths or _STOPS, **drawn).save(given.html, given.lang, queries=_QUERIES)
    if given.json is not None:
        write_json(given.json, found.to_json() | drawn)
    if console is not None:
        from clearhead.report import scaled

        scaled.show(console, found, drawn, growing, given.lang)
    return 0


def learn(given: argparse.Namespace) -> int:
    """Show how a small model learns W^Q, W^K and W^V."""
    from clearhead.explaining.learning import learning

    console = console_of(given)
    run = learning()
    step = int(run.step[-1]) if given.step is None else given.step
    if not 0 <= step <= run.step[-1]:
        raise FileError(f"--step is {step}: expected 0 to {run.step[-1]}.", "clearhead learn --step 47")
    if given.html is not None:
        run.save(given.html, given.lang)
    if given.json is not None:
        write_json(given.json, run.to_json())
    if console is not None:
        from clearhead.report import learned

        learned.show(console, run, step, given.lang)
    return 0


def heads(given: argparse.Namespace, case: "CheckedExample", console: "Console | None") -> int:
    """Compare the layer of a file with the same layer with other numbers of heads."""
    from clearhead.textbook.heads import heads_beside

    for name in ("head", "batch", "query", "html"):
        if getattr(given, name) is not None:
            raise FileError(f"--num-heads shows all heads side by side, and goes without --{name}.")
    if "x" not in case.inputs:
        raise FileError("--num-heads is for a layer: x, w_q, w_k, w_v, and w_o if there is one.")
    every = heads_beside(arguments.numbers("--num-heads", given.num_heads), **case.inputs)
    if given.json is not None:
        write_json(given.json, {"heads": [each.to_json() for each in every]})
    if console is not None:
        from clearhead.report import beside

        beside.show(console, case, every, given.lang)
    return 0
