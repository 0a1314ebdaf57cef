"""The commands that teach with numbers of their own: shapes, scale and learn."""

import argparse
from functools import partial

from clearhead import arguments
from clearhead.errors import FileError
from clearhead.report.streams import console_of, deliver

_QUERIES = 1000  # that `clearhead scale` draws for each width
_STOPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # of the slider on its page


def shapes(options: argparse.Namespace) -> int:
    """Print the shape and cost of every step of a layer."""
    from clearhead.textbook.layer_shapes import layer_shapes, read_sizes
    from clearhead.textbook.sparse import Pattern, sparse_patterns

    console, sizes = console_of(options), read_sizes(options.sizes)
    steps, patterns = layer_shapes(sizes), tuple[Pattern, ...]()
    if options.sparse is not None:
        n = sizes.get("n")
        if n is None or "m" in sizes:
            raise FileError("--sparse is for self-attention over n tokens.", "clearhead shapes n=1024 --sparse 64")
        patterns = sparse_patterns(n, options.sparse)
    sparse = [{"pattern": each.name, "pairs": each.pairs, "share": each.share} for each in patterns]
    deliver(options, lambda: steps.to_json() | ({"sparse": sparse} if patterns else {}))
    if console is not None:
        from clearhead.report.lessons import show_shapes, show_sparse

        show_shapes(console, steps, options.lang)
        show_sparse(console, steps, patterns, options.sparse, options.lang)
    return 0


def scale(options: argparse.Namespace) -> int:
    """Show with numbers why scores are divided by √d_k."""
    from clearhead.textbook.why_scale import WIDTHS, why_scale

    console = console_of(options)
    drawn = {"keys": options.keys, "queries": _QUERIES}
    widths = None if options.widths is None else arguments.numbers("--widths", options.widths)
    result = why_scale(widths or WIDTHS, **drawn)
    save = partial(why_scale(widths or _STOPS, **drawn).save, queries=_QUERIES) if options.html else None
    deliver(options, lambda: result.to_json() | drawn, save)
    if console is not None:
        from clearhead.report.lessons import show_scale

        show_scale(console, result, drawn, options.lang)
    return 0


def learn(options: argparse.Namespace) -> int:
    """Show how a small model learns W^Q, W^K and W^V."""
    from clearhead.explaining.learning import learning

    console = console_of(options)
    run = learning()
    step = int(run.step[-1]) if options.step is None else options.step
    if not 0 <= step <= run.step[-1]:
        raise FileError(f"--step is {step}: expected 0 to {run.step[-1]}.", "clearhead learn --step 47")
    deliver(options, run.to_json, run.save)
    if console is not None:
        from clearhead.report.lessons import show_learning

        show_learning(console, run, step, options.lang)
    return 0
