"""The command line: explain a text, trace a file, diagnose a file.

Data goes to standard output, words about problems to standard error.

Exit codes: 0 all is well, 1 a claim in a traced file is wrong or a mistake was found, 2 bad input, 3 no known mistake
explains the numbers, 130 interrupted.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from clearhead import __version__
from clearhead.errors import ClearheadError, FileError, MissingExtraError
from clearhead.files import check_writable, read_text, write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.view.long import Run

_EXPLAIN_EXAMPLES = """examples:
  clearhead explain "humpty dumpty sat on"
  clearhead explain "twinkle twinkle little star" --layer 0 --head 3 --token little
  clearhead explain "jack and jill" --lang zh
  clearhead explain "humpty dumpty sat on" --html page.html
  clearhead explain "Attention is all" --model ./gpt2 --json attention.json
  clearhead explain "Attention is all" --model Qwen/Qwen3-0.6B
  clearhead explain --file book.txt --html book.html --model ./gpt2
  clearhead explain --file book.txt --html book.html --windows
  clearhead explain --file book.txt --html book.html --exact 3.5,7.0 --dtype bfloat16
"""
_VIEW_EXAMPLES = """examples:
  clearhead view seen.safetensors
  clearhead view ./gpt2 --text-file book.txt

a file is what seen.save("seen.safetensors") wrote in Python; the address is for this machine
alone, and works until Ctrl-C
"""
_TRACE_EXAMPLES = """examples:
  clearhead trace example.json
  clearhead trace layer.npz --json steps.json --html page.html

a file holds q, k, v (or x, w_q, w_k, w_v, w_o, num_heads), any score rules, and, where it
likes, the values it claims for scores, scaled, weights or output:
  {"q": [[1, 3], [2, 0.5]], "k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]], "causal": true,
   "scores": [[6.5, 10], [2, 3.5]]}
"""


_DIAGNOSE_EXAMPLES = """examples:
  clearhead diagnose case.npz
  clearhead diagnose case.safetensors --lang zh
  clearhead diagnose case.json --json -

a file holds q, k, v (or x, w_q, w_k, w_v, w_o, num_heads), any score rules, what your code gave
for them as theirs, and, unless that is the output, its stage: weights, scores, scaled, masked:
  {"q": [[1, 3], [2, 0.5]], "k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]], "causal": true,
   "theirs": [[3.5, 11], [1.5, 5.5]], "stage": "scores"}
np.savez("case.npz", q=q, k=k, v=v, theirs=out, causal=True) writes one from Python.

exit code: 0 yours is right, 1 a mistake was found, 2 bad input, 3 no known mistake explains it
"""
_BENCH_EXAMPLES = """examples:
  clearhead bench --quick
  clearhead bench --peers torch --only full,causal
  clearhead bench --save benchmarks/results/today
  clearhead bench --device cuda --save benchmarks/results/today
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        _check_targets(given)
        return run(given)
    except ClearheadError as error:
        print(f"clearhead {given.command}: {error.one_line()}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say on one line what is wrong, where argparse would print the usage before it."""
        self.exit(2, f"{self.prog}: {message}. hint: {self.prog} --help shows examples.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="clearhead", description="Exact attention, with weights that stay visible.")
    parser.add_argument("--version", action="version", version=f"clearhead {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    explain = _command(
        commands, "explain", "show how one token's attention output came to be", _EXPLAIN_EXAMPLES, _explain
    )
    explain.add_argument("text", metavar="TEXT", nargs="?", help="the text to run through the model")
    explain.add_argument(
        "--file",
        metavar="FILE",
        help="read the text from FILE (- is standard input) without its last newline; with --html, every head of it",
    )
    explain.add_argument(
        "--windows",
        action="store_true",
        help="with --file: cut a text with more tokens than the model has positions into windows, and show each",
    )
    explain.add_argument("--exact", metavar="L.H,…", help="with --file and --html: the heads whose weights are exact")
    explain.add_argument("--dtype", metavar="NAME", help="with --file and --html: store q and k as float16 or bfloat16")
    explain.add_argument(
        "--model",
        metavar="DIR|NAME",
        help="a GPT-2 directory, or with Transformers any model's directory or name; default: the shipped one",
    )
    explain.add_argument(
        "--layer", type=int, metavar="N", help="the layer, from 0; default: the one with the sharpest head"
    )
    explain.add_argument("--head", type=int, metavar="N", help="the head, from 0; default: the sharpest")
    explain.add_argument(
        "--token", metavar="N|WORD", help="whose output: a position or a word; default: the last token"
    )
    trace = _command(
        commands, "trace", "compute a file's attention step by step and check its claims", _TRACE_EXAMPLES, _trace
    )
    trace.add_argument("file", metavar="FILE", help="a .json, .npz or .safetensors file")
    diagnose = _command(
        commands, "diagnose", "name the mistake in your attention from what it gave", _DIAGNOSE_EXAMPLES, _diagnose
    )
    diagnose.add_argument("file", metavar="FILE", help="a .npz, .json or .safetensors file")
    view = _command(commands, "view", "look at every head of a long text in the browser", _VIEW_EXAMPLES, _view)
    view.add_argument(
        "source", metavar="FILE|MODEL", nargs="?", help="a file of seen.save, or a model; default: the shipped one"
    )
    view.add_argument("--text-file", metavar="FILE", help="the text to run through MODEL; - is standard input")
    view.add_argument("--windows", action="store_true", help="with --text-file: cut a long text into windows")
    view.add_argument("--port", type=int, default=0, metavar="N", help="the port; default: a free one")
    view.add_argument("--no-open", action="store_true", help="do not open a browser, only say the address")
    bench = _command(commands, "bench", "time the engine beside its peers, in turn, as ratios", _BENCH_EXAMPLES, _bench)
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the Triton engine on a GPU")
    bench.add_argument("--quick", action="store_true", help="fewer cases and rounds: about a minute")
    bench.add_argument("--peers", metavar="A,B", help="only these peers; default: all that are installed")
    bench.add_argument("--only", metavar="A,B", help="only these groups of cases")
    bench.add_argument("--threads", type=int, metavar="N", help="threads for everybody; default: all cores")
    bench.add_argument("--save", metavar="DIR", help="write bench.json, bench.csv, bench.md and bench.svg there")
    info = _command(commands, "info", "say what is installed and which engine runs", "", _info)
    info.add_argument("--json", action="store_true", help="as JSON")
    for command in (explain, trace, diagnose, view):
        command.add_argument("--lang", choices=("en", "zh"), default="en", help="English or Chinese; default: en")
    for command in (explain, trace, diagnose):
        command.add_argument("--json", metavar="FILE", help="write every number to FILE as JSON; - is standard output")
    for command in (explain, trace):
        command.add_argument(
            "--html", metavar="FILE", help="write the page that shows it, one self-contained file; - is standard output"
        )
    return parser


def _command(
    commands: Any, name: str, about: str, examples: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _check_targets(given: argparse.Namespace) -> None:
    """Refuse before the work what could not be written after it."""
    targets = [getattr(given, name, None) for name in ("json", "html")]
    if targets == ["-", "-"]:
        raise FileError("--json - and --html - both write to standard output.", "name a file for one of them.")
    for target in targets:
        if isinstance(target, str):
            check_writable(target)


def _explain(given: argparse.Namespace) -> int:
    from clearhead.explain import explain, explain_windows
    from clearhead.hub import find
    from clearhead.report.progress import progress

    if (given.text is None) == (given.file is None):
        raise FileError("expected TEXT or --file, one of them.", 'clearhead explain "humpty dumpty sat on"')
    if given.windows and given.file is None:
        raise FileError("--windows is for the text of a file.", "clearhead explain --file FILE --windows")
    if given.file is not None:
        given.text = read_text(given.file)
    if not given.text.strip():
        raise FileError("the text is empty: there is no token to explain.", 'clearhead explain "humpty dumpty sat on"')
    if given.file is not None and given.html is not None:
        return _long_page(given)
    if given.exact is not None or given.dtype is not None:
        raise FileError("--exact and --dtype are for the page of a long text.", "--file FILE --html PAGE")
    chosen = {"layer": given.layer, "head": given.head, "token": given.token}
    model, each = find(given.model), partial(progress, what="layers")
    if given.windows:
        every = explain_windows(model, given.text, **chosen, each=each)
        data: dict[str, Any] = {"windows": [seen.to_json() for seen in every]}
    else:
        every = [explain(model, given.text, **chosen, each=each)]
        data = every[0].to_json()
    if given.json is not None:
        _write_json(given.json, data)
    if given.html is not None:
        every[0].save(given.html, given.lang)
    if "-" not in (given.json, given.html):
        from clearhead.report import explained

        console = _console()
        for seen in every:
            if seen is not every[0]:
                console.print()
            explained.show(console, seen, given.lang)
    return 0


def _long_page(given: argparse.Namespace) -> int:
    """Every head of a whole text, as one page."""
    from clearhead.hub import find
    from clearhead.report.progress import progress
    from clearhead.view import page
    from clearhead.view.long import Wish, document

    exact = None if given.exact is None else _pairs(given.exact)
    runs = _runs(given, find(given.model), given.text)
    wish = Wish(title=Path(given.file).name, language=given.lang, exact=exact, dtype=given.dtype)
    data = page.encoded(document(runs, wish, lambda layers: progress(layers, "heads")))
    write_whole(given.html, data)
    heads, tokens = sum(len(sight.heads) for sight in runs[0].sights), sum(len(run.tokens or ()) for run in runs)
    cut = f" in {len(runs)} windows" if given.windows else ""
    said = f"{len(runs[0].sights)} layers, {heads} heads, {tokens} tokens{cut}, {len(data) / 1e6:.1f} MB"
    if given.html != "-":
        _console().print(f"{given.html}: {said}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _pairs(given: str) -> list[tuple[str, int]]:
    """Layers and heads as people type them: 3.5,7.0."""
    try:
        parts = [part.rpartition(".") for part in given.split(",")]
        return [(layer, int(head)) for layer, _, head in parts]
    except ValueError:
        raise FileError(f"--exact is {given!r}: expected layer.head pairs.", "--exact 3.5,7.0") from None


def _view(given: argparse.Namespace) -> int:
    from clearhead.report.progress import progress
    from clearhead.view.long import Wish, document

    try:
        from clearhead.view import server
    except ImportError as error:
        raise MissingExtraError(f"view needs a server: {error}.", "pip install 'clearhead[view]'") from None

    def say(address: str) -> None:
        print(address, flush=True)
        if not given.no_open:
            import webbrowser

            webbrowser.open(address)

    with server.listen(given.port) as listening:
        runs = _viewed(given)
        wish = Wish(title=Path(given.text_file or given.source).name, language=given.lang, served=True)
        made = document(runs, wish, lambda layers: progress(layers, "heads"))
        with suppress(KeyboardInterrupt):  # the way to end it
            server.serve(made, runs, say, listening)
    return 0


def _runs(given: argparse.Namespace, model: Any, text: str) -> "list[Run]":
    """A text through a model, as one run, or as one for each window."""
    from clearhead.explain import seen_in, seen_windows
    from clearhead.report.progress import progress

    each = partial(progress, what="layers")
    return seen_windows(model, text, each) if given.windows else [seen_in(model, text, each)]


def _viewed(given: argparse.Namespace) -> "list[Run]":
    """A text through a model, or what `seen.save` wrote."""
    from clearhead.hub import find

    if given.text_file is not None:
        return _runs(given, find(given.source), read_text(given.text_file))
    if given.source is None:
        raise FileError("expected FILE, or --text-file with a model.", "clearhead view --text-file book.txt")
    from clearhead.watching.seen import load

    return [load(given.source)._run(0)]


def _trace(given: argparse.Namespace) -> int:
    from clearhead.claims import check_file

    case = check_file(given.file)
    if given.json is not None:
        _write_json(given.json, case.to_json())
    if given.html is not None:
        case.save(given.html, given.lang)
    if "-" not in (given.json, given.html):
        from clearhead.report import traced

        traced.show(_console(), case, given.lang)
    return 0 if case.first_wrong is None else 1


def _diagnose(given: argparse.Namespace) -> int:
    from clearhead.diagnosis import diagnose_file

    diagnosis = diagnose_file(given.file)
    if given.json is not None:
        _write_json(given.json, diagnosis.to_json())
    if given.json != "-":
        from clearhead.report import diagnosed

        diagnosed.show(_console(), diagnosis, given.lang)
    return {"right": 0, "unexplained": 3}.get(diagnosis.verdict, 1)


def _bench(given: argparse.Namespace) -> int:
    from clearhead.bench.command import bench
    from clearhead.threads import get_num_threads, read_threads

    if given.device == "cuda":
        from clearhead.bench import gpu

        gpu.bench(quick=given.quick, save=given.save)
        return 0
    threads = get_num_threads() if given.threads is None else read_threads(given.threads, "--threads 2")
    bench(quick=given.quick, chosen=given.peers, only=given.only, save=given.save, threads=threads)
    return 0


def _info(given: argparse.Namespace) -> int:
    from clearhead.engines import native
    from clearhead.threads import get_num_threads

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


def _console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if console.color_system == "standard":  # sixteen colours make no scale; terminals with only those are gone
        console = Console(highlight=False, markup=False, emoji=False, color_system="256")
    return console


def _write_json(target: str, data: dict[str, Any]) -> None:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(target, text.encode("utf-8"))


if __name__ == "__main__":
    sys.exit(main())
