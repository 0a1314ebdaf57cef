"""The command line: runs explain, shapes, scale, learn, trace, diagnose, view, serve, bench, info and models.

Data goes to standard output, messages about problems to standard error.

Exit codes: 0 success, 1 a claim in a traced file is wrong or a mistake was found, 2 bad input or output that cannot
be written, 3 no known mistake explains the numbers, 130 interrupted.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead import __version__, arguments
from clearhead.core.files import check_writable, read_text
from clearhead.errors import ClearheadError, FileError, MissingExtraError, RuleError, SelectionError
from clearhead.report import streams
from clearhead.report.streams import console_of, deliver, progress
from clearhead.tables import aligned
from clearhead.words import say, table

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.explaining.explanation import Explanation
    from clearhead.explaining.head_steps import HeadSteps


def main(typed: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    with streams.readable():
        try:
            try:
                return _run(arguments.read(list(sys.argv[1:] if typed is None else typed)))
            finally:
                sys.stdout.flush()
        except BrokenPipeError:  # the reader of a pipe closed it
            streams.abandon()
            return 0
        except OSError as error:
            streams.abandon()
            streams.complain("clearhead", f"{error.filename or 'standard output'}: {error.strerror or error}.")
            return 2
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130


def _run(options: argparse.Namespace) -> int:
    if options.command is None:
        print(table("help")["doors"][options.lang], end="")
        return 0
    complain = partial(streams.complain, f"clearhead {options.command}")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_args, **_named: complain(f"warning: {message}")
        try:
            _check_targets(options)
            return _COMMANDS[options.command](options)
        except ClearheadError as error:
            complain(error.one_line())
        except MemoryError:
            complain("there is not enough memory for this.")
    return 2


def _check_targets(options: argparse.Namespace) -> None:
    """Raise FileError before the work if its result could not be written afterwards."""
    targets = [getattr(options, name, None) for name in ("json", "html")]
    if targets == ["-", "-"]:
        raise FileError("--json - and --html - both write to standard output.", "name a file for one of them.")
    for target in targets:
        if isinstance(target, str):
            check_writable(target)
    if isinstance(targets[1], str):
        from clearhead.view.page import check_name

        check_name(targets[1])


def _explain(options: argparse.Namespace) -> int:
    from clearhead.models.tokenizer import check_unicode

    check_unicode("TEXT", options.text or "")
    asked = arguments.asked_for(options)
    if options.file is not None:
        options.text = read_text(options.file)
    if options.chat is None and not options.text.strip():
        raise FileError("the text is empty: there is no token to explain.", arguments.EXAMPLE)
    return _changed(options) if options.edits else _answered(options, asked)


def _prompt(options: argparse.Namespace) -> Any:
    """The text, or with --chat the messages; a file's text begins the user's message."""
    if options.chat is None:
        return options.text
    content = options.chat if options.text is None else f"{options.text.strip()}\n\n{options.chat.strip()}"
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, {"role": "user", "content": content}]


def _answered(options: argparse.Namespace, asked: set[str]) -> int:
    """Print why the answer follows, then what the options request besides.

    Only steps are shown for a chosen token, a generated text, and a model that predicts no next token.
    """
    from clearhead.explaining.steps import places_of
    from clearhead.models.finding import load_model

    console, model = console_of(options), load_model(options.model)
    places_of(model, options.layer, options.head)  # raises before the work
    shown = arguments.shown(asked)
    of_answer, way, alone = (part in shown for part in ("answer", "way", "alone"))
    steps, cause = alone or "steps" in shown, None
    if not alone and (shown or console is not None or "html" in asked):
        try:
            cause = _cause(options, model, console)
        except (RuleError, SelectionError) as error:
            if of_answer or way:
                raise
            steps |= isinstance(error, RuleError)  # a SelectionError: no part of the text can be hidden
    trust = cause.trust() if cause is not None and options.trust else None
    seen = None
    page = cause if asked.isdisjoint(("layer", "head")) else None  # a page that opens with what made the answer
    if steps or way or page is None or ("json" in asked and not of_answer):
        seen = _seen(options, model, cause if steps or way else None)
    result: Any = cause if cause is not None and (of_answer or seen is None) else seen
    tried = {} if trust is None else {"trust": trust._asdict()}
    deliver(options, lambda: result.to_json() | tried, (page or result).save)
    if console is None:
        return 0
    from clearhead.report import answered, attribution, explained

    if cause is not None:
        whole = bool(options.why or options.all)
        answered.show(console, cause, options.lang, whole=whole, trust=trust, more=not steps, begun=True)
    elif not steps and seen is not None:
        explained.show_opening(console, seen, options.lang)
    if seen is not None and steps:
        if cause is not None:
            console.print()
        explained.show(console, seen, options.lang)
    if seen is not None and (way or steps):
        ways = cause.ways if cause else []
        attribution.show(console, replace(seen, ways=ways) if ways else seen, options.lang)
    return 0


def _changed(options: argparse.Namespace) -> int:
    """Print what the model says next without and with the edits."""
    from clearhead.changing.edits_text import edits_from_options
    from clearhead.explaining.texts import read
    from clearhead.models.finding import load_model
    from clearhead.report import changed

    edits = edits_from_options(options.edits, options.layer, options.head, options.rest or "renormalise")
    console, model = console_of(options), load_model(options.model)
    reading = read(model, _prompt(options))
    tokens = changed.moved(model, reading, edits, partial(progress, what="layers"))
    found = {"model": model.name, "text": reading.text, "edits": list(map(repr, edits)), "next": tokens}
    deliver(options, lambda: found)
    if console is not None:
        changed.show(console, model, reading, edits, tokens, options.lang)
    return 0


def _cause(options: argparse.Namespace, model: Any, console: "Console | None") -> "Explanation":
    """Explain why an answer follows the text, or the chat; prints each finding as soon as it is known."""
    from clearhead.explaining.explain import explain
    from clearhead.explaining.texts import read
    from clearhead.report import answered
    from clearhead.watching.pieces import SENTENCE_END

    whole = bool(options.why or options.all)
    told = partial(answered.begin, console, language=options.lang, whole=whole) if console else None
    prompt, hide = _prompt(options), None
    several = options.file is not None and SENTENCE_END.search(options.text.strip())
    if options.chat is not None and (options.text or "").strip():
        reading = read(model, prompt)
        start, stop = reading.turns[-1]
        if stop > start:  # a template may have left it out
            hide = [(start, stop - len(f"\n\n{options.chat.strip()}"))]
    asked = {
        "answer": options.why if isinstance(options.why, str) else options.answer,
        "against": options.against,
        "word": options.word,
        "generate": options.generate,
        "parts": options.parts or ("sentences" if several else "words"),
        "hide": hide,
    }
    return explain(prompt, model, **asked, each=partial(progress, what="runs"), told=told)


def _seen(options: argparse.Namespace, model: Any, cause: "Explanation | None") -> "HeadSteps":
    """The steps of one token of a text in the chosen head, or in the head that carries the answer."""
    from clearhead.explaining.steps import steps_of_text

    chosen = {"layer": options.layer, "head": options.head, "token": options.token}
    each = partial(progress, what="layers")
    if cause is not None and not options.generate:
        return cause.steps(**chosen)
    return steps_of_text(_prompt(options), model, **chosen, generate=options.generate, each=each)


def _view(options: argparse.Namespace) -> int:
    try:
        from clearhead.view import server
    except ImportError as error:
        what = f"{options.command} needs Starlette and Uvicorn, which are not installed ({error})."
        raise MissingExtraError(what, 'pip install "clearhead[view]"') from None

    def say(address: str) -> None:
        print(address, flush=True)
        if not options.no_open:
            import webbrowser

            webbrowser.open(address)

    with server.listen(options.port) as listening:
        parts = (_any_text if options.command == "serve" else _long_text)(options)
        with suppress(KeyboardInterrupt):  # the way to end it
            server.serve(say, listening, **parts)
    return 0


def _long_text(options: argparse.Namespace) -> dict[str, Any]:
    """Run a text for the page of every head, whose weights the server computes."""
    from clearhead.explaining.head_steps import shown_run
    from clearhead.models.finding import load_model
    from clearhead.spelling import cut
    from clearhead.view.long import document
    from clearhead.view.server import weights_of

    if options.file is None:
        raise FileError("expected --file: the text to run.", "clearhead view --file book.txt")
    text = read_text(options.file)
    runs = [shown_run(load_model(options.model), text, partial(progress, what="layers"))]
    title = say(options.lang, "view title", text=cut(text.strip(), 40))
    shown = document(runs, title, options.lang, served=True, each=partial(progress, what="heads"))
    return {"document": lambda: shown, "doors": weights_of(runs)}


def _any_text(options: argparse.Namespace) -> dict[str, Any]:
    """Load a model for the page to type in, whose questions the server answers."""
    from clearhead.explaining import serving
    from clearhead.models.finding import SHIPPED_HERE, load_model

    served = serving.Served(
        options.model or SHIPPED_HERE, load_model(options.model), options.lang, first=options.model or ""
    )
    return {"document": partial(serving.page, served), "work": partial(serving.run, served)}


def _lesson(options: argparse.Namespace) -> int:
    from clearhead.report import lessons

    return {"shapes": lessons.shapes, "scale": lessons.scale, "learn": lessons.learn}[options.command](options)


def _case(options: argparse.Namespace, console: "Console | None") -> Path:
    """The given file, or the command's example, which the terminal then announces."""
    if options.file is None and console is not None:
        console.print(f"{say(options.lang, f'{options.command} example')}\n")
    return Path(options.file or Path(__file__).parent / "textbook" / f"{options.command}.json")


def _trace(options: argparse.Namespace) -> int:
    from clearhead.diagnosing.claims import check_file
    from clearhead.report import traced

    console = console_of(options)
    case = check_file(_case(options, console))
    place = traced.chosen(case, options.batch, options.head, options.query)
    deliver(options, case.to_json, case.save)
    if console is not None:
        traced.show(console, case, options.lang, place)
    return 0 if case.first_wrong is None else 1


def _diagnose(options: argparse.Namespace) -> int:
    from clearhead.diagnosing.diagnose import diagnose_file

    console = console_of(options)
    diagnosis = diagnose_file(_case(options, console))
    deliver(options, diagnosis.to_json)
    if console is not None:
        from clearhead.report.traced import show_diagnosis

        show_diagnosis(console, diagnosis, options.lang)
    return {"right": 0, "unexplained": 3}.get(diagnosis.verdict, 1)


def _bench(options: argparse.Namespace) -> int:
    from clearhead.engines.threads import set_num_threads

    if options.threads is not None:
        set_num_threads(options.threads)  # says what is wrong with the number
    from clearhead.bench.self_check import self_check

    self_check()
    return 0


def _info(options: argparse.Namespace) -> int:
    from importlib.metadata import PackageNotFoundError, version

    from clearhead.engines import native
    from clearhead.engines.threads import get_num_threads

    levels = native.levels()
    why = "CLEARHEAD_ISA" if os.environ.get("CLEARHEAD_ISA") else f"the first of {', '.join(levels)}"
    facts: dict[str, str | int] = {"clearhead": __version__, "engine": "native" if native.level() else "portable"}
    facts["instruction set"] = f"{native.level()}, {why}" if native.level() else native.missing()
    if native.absent_levels():
        facts["not compiled"] = f"{', '.join(native.absent_levels())}: {native.ALL_LEVELS}"
    facts["threads"] = get_num_threads()
    for package in ("numpy", "torch", "triton", "transformers", "onnxruntime", "jax"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    if options.json:
        print(json.dumps(facts))
    else:
        print("\n".join(aligned((16, 0), (name, str(value)), " ") for name, value in facts.items()))
    return 0


def _models(options: argparse.Namespace) -> int:
    """List the models on this machine."""
    from clearhead.models.finding import models_here

    listed = models_here()
    if options.json:
        print(json.dumps(listed, ensure_ascii=False))
        return 0
    streams.check_encoding(options.lang)
    names = [say(options.lang, "shipped model"), *(streams.printable(each["name"]) for each in listed[1:])]
    wide = max(map(arguments.columns, names))
    for name, each in zip(names, listed, strict=True):
        count = each["parameters"] / (1e4 if options.lang == "zh" else 1e6)
        facts = say(options.lang, "model facts", count=count, **each)
        print(aligned((wide, 0), (name, streams.printable(each["reason"]) or facts), "  ", arguments.columns))
    runs = [name for name, each in zip(names, listed, strict=True) if not each["reason"]][1:2]
    print(f"\n{say(options.lang, 'run model' if runs else 'get model', name=''.join(runs))}")
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "explain": _explain,
    "shapes": _lesson,
    "scale": _lesson,
    "learn": _lesson,
    "trace": _trace,
    "diagnose": _diagnose,
    "view": _view,
    "serve": _view,
    "bench": _bench,
    "info": _info,
    "models": _models,
}

if __name__ == "__main__":
    sys.exit(main())
