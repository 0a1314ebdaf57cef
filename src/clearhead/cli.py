"""The command line: explain a text, shapes, scales and learning, trace a file, diagnose a file, view, bench, info.

Data goes to standard output, messages about problems to standard error.

Exit codes: 0 success, 1 a claim in a traced file is wrong or a mistake was found, 2 bad input or output that cannot
be written, 3 no known mistake explains the numbers, 130 interrupted.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead import __version__, arguments, lessons
from clearhead.core.files import check_writable, read_text, write_whole
from clearhead.errors import ClearheadError, FileError, MissingExtraError
from clearhead.report import streams
from clearhead.report.streams import console_of as _console
from clearhead.report.streams import write_json as _write_json
from clearhead.words import Language

if TYPE_CHECKING:
    from clearhead.view.long import ShownRun


def main(given: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    language: Language = "en"
    with streams.readable():
        try:
            try:
                values = arguments.given(list(sys.argv[1:] if given is None else given))
                language = values.lang
                return _run(values)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # the reader of a pipe closed it
            streams.abandon()
            return 0
        except OSError as error:
            streams.abandon()
            words = f"{error.filename or 'standard output'}: {error.strerror or error}."
            streams.complain("clearhead", words, language=language)
            return 2
        except KeyboardInterrupt:
            print(streams.in_language(language, "interrupted"), file=sys.stderr)
            return 130


def _run(given: argparse.Namespace) -> int:
    if given.command is None:
        given.usage()
        return 0
    try:
        _check_targets(given)
        return _COMMANDS[given.command](given)
    except ClearheadError as error:
        streams.complain(f"clearhead {given.command}", error.what, error.hint, given.lang)
    except MemoryError:
        words = "there is not enough memory for this."
        streams.complain(f"clearhead {given.command}", words, language=given.lang)
    return 2


def _check_targets(given: argparse.Namespace) -> None:
    """Raise before the work where its result could not be written after it."""
    targets = [getattr(given, name, None) for name in ("json", "html")]
    if targets == ["-", "-"]:
        raise FileError("--json - and --html - both write to standard output.", "name a file for one of them.")
    for target in targets:
        if isinstance(target, str):
            check_writable(target)


def _explain(given: argparse.Namespace) -> int:
    from clearhead.changing.edits_text import edits_from_options
    from clearhead.explaining.explain import explain, explain_windows
    from clearhead.explaining.hub import find
    from clearhead.explaining.texts import check_unicode
    from clearhead.report.progress import progress

    check_unicode("TEXT", given.text or "")
    if isinstance(given.why, str) and given.text is None and given.file is None:
        raise FileError(f"expected TEXT: {given.why!r} follows --why.", "clearhead explain TEXT --why")
    if (given.text is None) == (given.file is None):
        raise FileError("expected TEXT or --file, one of them.", 'clearhead explain "humpty dumpty sat on"')
    edits = edits_from_options(given.edits or (), given.layer, given.head) or None
    causes = given.why is not None or given.against is not None
    if edits and (given.windows or (given.file is not None and given.html is not None and not causes)):
        raise FileError(
            "--cut, --boost and --off are for one run of a text, not for windows or the page of a file's every head.",
            'clearhead explain TEXT --cut "on>sat" --html PAGE',
        )
    if given.windows and given.file is None:
        raise FileError("--windows is for the text of a file.", "clearhead explain --file FILE --windows")
    if given.file is not None:
        given.text = read_text(given.file)
    if not given.text.strip():
        raise FileError("the text is empty: there is no token to explain.", 'clearhead explain "humpty dumpty sat on"')
    if causes:
        return _why(given, edits)
    if given.file is not None and given.html is not None:
        return _long_page(given)
    console = _console(given)
    if given.exact is not None or given.dtype is not None:
        raise FileError("--exact and --dtype are for the page of a long text.", "--file FILE --html PAGE")
    chosen = {"layer": given.layer, "head": given.head, "token": given.token}
    model, each = find(given.model), partial(progress, what="layers")
    if given.windows:
        every = explain_windows(model, given.text, **chosen, each=each)
        data: dict[str, Any] = {"windows": [seen.to_json() for seen in every]}
    else:
        every = [explain(given.text, model, **chosen, edits=edits, generate=given.generate, each=each)]
        data = every[0].to_json()
    if given.json is not None:
        _write_json(given.json, data)
    if given.html is not None:
        every[0].save(given.html, given.lang)
    if console is not None:
        from clearhead.report import changed, explained, way

        if edits:
            changed.show(console, every[0], given.lang)
            return 0
        for seen in every:
            if seen is not every[0]:
                console.print()
            explained.show(console, seen, given.lang)
            way.show(console, seen, given.lang)
    return 0


def _why(given: argparse.Namespace, edits: Any) -> int:
    """Say why one token follows the text and not another."""
    from clearhead.explaining.why import why
    from clearhead.report.progress import progress

    if given.why is None:
        raise FileError("--against is for --why.", "clearhead explain TEXT --why --against TOKEN")
    for name in ("windows", "exact", "dtype", "token", *(() if edits else ("layer", "head"))):
        if getattr(given, name) is not None and getattr(given, name) is not False:
            hint = "end TEXT with that token." if name == "token" else f"leave --{name} out."
            raise FileError(f"--why is for what follows a whole text, not for --{name}.", hint)
    console = _console(given)
    each = partial(progress, what="runs")
    token = None if given.why is True else given.why
    seen = why(given.text, given.model, token=token, against=given.against, edits=edits, each=each)
    if given.json is not None:
        _write_json(given.json, seen.to_json())
    if given.html is not None:
        seen.save(given.html, given.lang)
    if console is not None:
        from clearhead.report import why as report

        report.show(console, seen, given.lang)
    return 0


def _long_page(given: argparse.Namespace) -> int:
    """Write every head of a whole text as one page."""
    from clearhead.explaining.hub import find
    from clearhead.report.progress import progress
    from clearhead.view import page
    from clearhead.view.long import PageOptions, document

    for name in ("json", "layer", "head", "token"):
        if getattr(given, name) is not None:
            raise FileError(f"--{name} is for one token, and --file with --html shows every head of all tokens.")
    exact = None if given.exact is None else arguments.pairs(given.exact)
    runs = _runs(given, find(given.model), given.text)
    wish = PageOptions(title=_title(given.file), language=given.lang, exact=exact, dtype=given.dtype)
    data = page.encoded(document(runs, wish, lambda layers: progress(layers, "heads")))
    write_whole(given.html, data)
    heads, tokens = sum(len(layer.heads) for layer in runs[0].layers), sum(len(run.tokens or ()) for run in runs)
    cut = f" in {len(runs)} windows" if given.windows else ""
    said = f"{len(runs[0].layers)} layers, {heads} heads, {tokens} tokens{cut}, {len(data) / 1e6:.1f} MB"
    if given.html != "-":
        print(f"{streams.printable(given.html)}: {said}")
    return 0


def _view(given: argparse.Namespace) -> int:
    from clearhead.report.progress import progress
    from clearhead.view.long import PageOptions, document

    try:
        from clearhead.view import server
    except ImportError as error:
        words = f"view needs Starlette and Uvicorn, which are not installed ({error})."
        raise MissingExtraError(words, 'pip install "clearhead[view]"') from None

    def say(address: str) -> None:
        print(address, flush=True)
        if not given.no_open:
            import webbrowser

            webbrowser.open(address)

    with server.listen(given.port) as listening:
        runs = _viewed(given)
        wish = PageOptions(title=_title(given.text_file or given.source), language=given.lang, served=True)
        made = document(runs, wish, lambda layers: progress(layers, "heads"))
        with suppress(KeyboardInterrupt):  # the way to end it
            server.serve(made, runs, say, listening)
    return 0


def _runs(given: argparse.Namespace, model: Any, text: str) -> "list[ShownRun]":
    """Run a text through a model, in one run, or in one for each window."""
    from clearhead.explaining.every_layer import seen_in, seen_windows
    from clearhead.report.progress import progress

    each = partial(progress, what="layers")
    return seen_windows(model, text, each) if given.windows else [seen_in(model, text, each)]


def _viewed(given: argparse.Namespace) -> "list[ShownRun]":
    """The runs to show: a text through a model, or a file that `seen.save` wrote."""
    from clearhead.explaining.hub import find

    if given.text_file is not None:
        return _runs(given, find(given.source), read_text(given.text_file))
    if given.source is None:
        raise FileError("expected FILE, or --text-file with a model.", "clearhead view --text-file book.txt")
    from clearhead.view.pictured import run_of
    from clearhead.watching.seen import load

    return [run_of(load(given.source))]


def _trace(given: argparse.Namespace) -> int:
    from clearhead.diagnosing.claims import check_file
    from clearhead.report import traced

    console = _console(given)
    case = check_file(given.file)
    if given.num_heads is not None:
        return lessons.heads(given, case, console)
    place = traced.chosen(case, given.batch, given.head, given.query)
    if given.html is not None:
        case.save(given.html, given.lang)
    if given.json is not None:
        _write_json(given.json, case.to_json())
    if console is not None:
        traced.show(console, case, given.lang, place)
    return 0 if case.first_wrong is None else 1


def _diagnose(given: argparse.Namespace) -> int:
    from clearhead.diagnosing.diagnose import diagnose_file

    console = _console(given)
    diagnosis = diagnose_file(given.file)
    if given.json is not None:
        _write_json(given.json, diagnosis.to_json())
    if console is not None:
        from clearhead.report import diagnosed

        diagnosed.show(console, diagnosis, given.lang)
    return {"right": 0, "unexplained": 3}.get(diagnosis.verdict, 1)


def _bench(given: argparse.Namespace) -> int:
    from clearhead.engines.threads import set_num_threads

    if given.threads is not None:
        set_num_threads(given.threads)  # says what is wrong with the number
    contest = arguments.contest(given)
    if contest:
        names = ", ".join(part for part in contest if part.startswith("--"))
        threads = [] if given.threads is None else ["--threads", str(given.threads)]
        raise FileError(
            f"{names}: for the contests with other libraries, which are not installed but lie in the source checkout.",
            shlex.join(["python", "-m", "benchmarks", *contest, *threads]),
        )
    from clearhead.bench.self_check import self_check

    self_check()
    return 0


def _info(given: argparse.Namespace) -> int:
    from clearhead.engines import native
    from clearhead.engines.threads import get_num_threads

    levels = native.levels()
    why = "CLEARHEAD_ISA" if os.environ.get("CLEARHEAD_ISA") else f"the first of {', '.join(levels)}"
    facts: dict[str, str | int] = {"clearhead": __version__, "engine": "native" if native.level() else "portable"}
    facts["instruction set"] = f"{native.level()}, {why}" if native.level() else native.missing()
    facts["threads"] = get_num_threads()
    for package in ("numpy", "torch", "triton", "transformers", "onnxruntime", "jax", "matplotlib"):
        facts[package] = _version(package)
    if given.json:
        print(json.dumps(facts))
    else:
        print("\n".join(f"{name:<16} {value}" for name, value in facts.items()))
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _title(path: str) -> str:
    """A file's name as a page's title; bytes that are not UTF-8 are replaced."""
    return Path(path).name.encode("utf-8", "replace").decode("utf-8")


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "explain": _explain,
    "shapes": lessons.shapes,
    "scale": lessons.scale,
    "learn": lessons.learn,
    "trace": _trace,
    "diagnose": _diagnose,
    "view": _view,
    "bench": _bench,
    "info": _info,
}

if __name__ == "__main__":
    sys.exit(main())
