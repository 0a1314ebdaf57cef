"""The command line's arguments: those of every command, their help, and their errors."""

import argparse
import sys
from typing import Any, NoReturn

from clearhead import __version__
from clearhead.errors import FileError, shown
from clearhead.report.streams import complain
from clearhead.textbook import usage

_ABOUT = """Exact attention, with weights that stay visible."""
_EXTRAS = """install more:
  pip install "clearhead[hf]"      explain and view with models of Transformers
  pip install "clearhead[view]"    clearhead view

clearhead COMMAND --help shows a command's options and examples
"""
_EXPLAIN_EXAMPLES = """examples:
  clearhead explain "humpty dumpty sat on"
  clearhead explain "twinkle twinkle little star" --layer 0 --token little
  clearhead explain "mary had a little" --cut "little>mary" --layer 0
  clearhead explain "humpty dumpty sat on" --cut "on>sat@0.3" --off 1.2,1.5
  clearhead explain "mary had a little" --why
  clearhead explain "mary had a little" --why lamb --against dog
  clearhead explain "mary had a little" --why --html why.html
  clearhead explain "humpty dumpty" --generate 8
  clearhead explain "jack and jill" --lang zh
  clearhead explain "humpty dumpty sat on" --html page.html
  clearhead explain "Attention is all" --model ./gpt2 --json attention.json
  clearhead explain "Attention is all" --model Qwen/Qwen3-0.6B
  clearhead explain --file book.txt --html book.html --model ./gpt2
  clearhead explain --file book.txt --html book.html --windows
  clearhead explain --file book.txt --html book.html \\
      --exact 3.5,7.0 --dtype bfloat16

edits: the text is run without and with them, several of each together
  --cut "on>sat"       the query on no longer sees the key sat, in every layer
                       and head, or in those of --layer and --head
  --cut "on>sat@0.3"   in head 3 of layer 0; @0 all of layer 0, @.3 head 3 of
                       every layer, @0.3,1.5 two heads
  --cut ">0:2"         no query sees the first two tokens; --cut "3>0,sat" names
                       tokens by position and by word
  --boost "sat=2"      2 is added to the logits of the key sat, for every query;
                       also "on>sat=2@0.3"; below 0 it gets less
  --off 0.3            the output of head 3 of layer 0 becomes 0; 0 is a layer
words are those of the text, whole; sat#2 is the second, sat#all all of them;
negative positions count from the end: --cut="-1>0"
--layer and --head also choose the head to show; default: the edited one whose
output moved furthest

models other than GPT-2 directories need PyTorch and Transformers:
  pip install "clearhead[hf]"
"""
_VIEW_EXAMPLES = """examples:
  clearhead view seen.safetensors
  clearhead view ./gpt2 --text-file book.txt

a file is what seen.save("seen.safetensors") wrote in Python; the address is for
this machine alone, and works until Ctrl-C

the server needs Starlette and Uvicorn:
  pip install "clearhead[view]"
"""
_TRACE_EXAMPLES = """examples:
  clearhead trace example.json
  clearhead trace layer.npz --head 3 --query 7
  clearhead trace layer.npz --num-heads 1,8
  clearhead trace layer.npz --json steps.json --html page.html

a file holds q, k, v (or x, w_q, w_k, w_v, w_o, num_heads; or weights and v),
any score rules, the names of the tokens, and, if you want them checked, values
that you claim for scores, scaled, weights or output, and of a layer also for Q,
K, V, heads and H, the heads joined:
  {"q": [[1, 3], [2, 0.5]], "k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]],
   "scores": [[6.5, 10], [2, 3.5]], "tokens": ["hello", "world"]}
  {"weights": [0.15, 0.25, 0.55, 0.05], "v": [[1], [2], [3], [4]]}
tokens are those of the queries where source_tokens names the keys

exit code: 0 every claim is right, 1 a claim is wrong, 2 bad input
"""
_DIAGNOSE_EXAMPLES = """examples:
  clearhead diagnose case.npz
  clearhead diagnose case.safetensors --lang zh
  clearhead diagnose case.json --json -

a file holds q, k, v (or x, w_q, w_k, w_v, w_o, num_heads; or weights and v),
any score rules, and as theirs what your code gave for them; if that is not the
output, its stage says which step it is: weights, scores, scaled or masked:
  {"q": [[1, 3], [2, 0.5]], "k": [[0.5, 2], [1, 3]], "v": [[0, 4], [1, 2]],
   "theirs": [[3.5, 11], [1.5, 5.5]], "stage": "scores"}
np.savez("case.npz", q=q, k=k, v=v, theirs=out, causal=True) writes one from
Python

exit code: 0 yours is right, 1 a mistake was found, 2 bad input, 3 no known
mistake explains it
"""
_BENCH_EXAMPLES = """examples:
  clearhead bench
  clearhead bench --threads 1

contests with PyTorch's backends, ONNX Runtime and JAX, and on a GPU, are run in
a checkout of the sources:
  python -m benchmarks --help
"""
_INFO_EXAMPLES = """examples:
  clearhead info
  clearhead info --json
"""
_IN_ENGLISH = ("bench", "info")  # commands without --lang


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2; argparse would print the usage before it."""
        complain(self.prog, f"{message}. hint: {self.prog} --help shows examples.")
        sys.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Let an error of writing the help be raised; argparse would ignore it."""
        (file or sys.stdout).write(message)


def given(arguments: list[str]) -> argparse.Namespace:
    """The arguments as values; exits with code 2 and one line about what is wrong."""
    parser = command_line()
    first = arguments[0] if arguments else ""
    if first.startswith("-") and not any(first.startswith(known) for known in ("-h", "--h", "--v", "--l")):
        parser.error(f"{first} stands before the command: options go after it, as in clearhead explain … {first}")
    values = parser.parse_args(arguments)
    if values.lang is not None and values.command in _IN_ENGLISH:
        parser.error(f"--lang {values.lang}: {values.command} prints English only")
    values.lang = values.lang or "en"
    values.usage = parser.print_help
    return values


def command_line() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="clearhead", description=_ABOUT, epilog=_EXTRAS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"clearhead {__version__}")
    _languages(parser, None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for add in (_explain, _shapes, _scale, _learn, _trace, _diagnose, _view, _bench, _info):
        add(commands)
    return parser


def _command(commands: Any, name: str, about: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def _explain(commands: Any) -> None:
    explain = _command(commands, "explain", "show how one token's attention output came to be", _EXPLAIN_EXAMPLES)
    explain.add_argument("text", metavar="TEXT", nargs="?", help="the text to run through the model")
    explain.add_argument(
        "--file",
        type=_name,
        metavar="FILE",
        help="read the text from FILE (- is standard input) without its last newline; with --html, every head of it",
    )
    explain.add_argument(
        "--windows",
        action="store_true",
        help="with --file: cut a text with more tokens than the model has positions into windows, and show each",
    )
    explain.add_argument(
        "--exact", type=_name, metavar="L.H,…", help="with --file and --html: the heads whose weights are exact"
    )
    explain.add_argument(
        "--dtype", type=_name, metavar="NAME", help="with --file and --html: store q and k as float16 or bfloat16"
    )
    explain.add_argument(
        "--model",
        type=_name,
        metavar="DIR|NAME",
        help="a GPT-2 directory, or with Transformers any model's directory or name; default: the shipped one",
    )
    explain.add_argument(
        "--layer", type=_whole, metavar="N", help="the layer, from 0; default: the one with the sharpest head"
    )
    explain.add_argument("--head", type=_whole, metavar="N", help="the head, from 0; default: the sharpest")
    explain.add_argument(
        "--token", type=_name, metavar="N|WORD", help="whose output: a position or a word; default: the last token"
    )
    explain.add_argument(
        "--generate",
        type=_whole,
        default=0,
        metavar="N",
        help="let the model put N tokens after the text first",
    )
    _edit(explain, "cut", "Q>K[@L.H]", "run the text also with queries Q not seeing keys K, and compare (see below)")
    _edit(explain, "boost", "K=X[@L.H]", "run it also with X added to the logits of keys K, and compare")
    off = "run it also with these heads' outputs 0, and compare; without a value: those of --layer and --head"
    _edit(explain, "off", "L.H,…", off, nargs="?", const=("off", ""))
    explain.add_argument(
        "--why",
        type=_name,
        nargs="?",
        const=True,
        metavar="TOKEN",
        help="why TOKEN comes next: the edges, tokens and heads behind it, run again without them; default: the "
        "likeliest",
    )
    explain.add_argument(
        "--against", type=_name, metavar="TOKEN", help="with --why: rather than TOKEN; default: the likeliest other one"
    )
    _files(explain, html=True)
    _languages(explain, argparse.SUPPRESS)


def _edit(explain: argparse.ArgumentParser, name: str, form: str, about: str, **more: Any) -> None:
    """An option that adds its name and value to `edits`, so that edits keep their order."""

    def named(text: str) -> tuple[str, str]:
        return name, text

    explain.add_argument(f"--{name}", dest="edits", action="append", type=named, metavar=form, help=about, **more)


def _shapes(commands: Any) -> None:
    shapes = _command(commands, "shapes", "print the shape and cost of every step of a layer", usage.SHAPES)
    shapes.add_argument("sizes", type=_name, nargs="*", metavar="SIZE", help="n=12, or n for a symbol (see below)")
    _files(shapes, html=False)
    _languages(shapes, argparse.SUPPRESS)


def _scale(commands: Any) -> None:
    scale = _command(commands, "scale", "show with numbers why scores are divided by √d_k", usage.SCALE)
    scale.add_argument("--widths", type=_name, metavar="N,N,…", help="the values of d_k; default: 1,4,16,64,256")
    scale.add_argument("--keys", type=_whole, default=16, metavar="N", help="keys of each query; default: 16")
    _files(scale, html=True)
    _languages(scale, argparse.SUPPRESS)


def _learn(commands: Any) -> None:
    learn = _command(commands, "learn", "watch a small model learn W_Q, W_K and W_V", usage.LEARN)
    learn.add_argument(
        "--step",
        type=_whole,
        metavar="N",
        help="the training step to show, or the recorded one before it; default: the last",
    )
    _files(learn, html=True)
    _languages(learn, argparse.SUPPRESS)


def _trace(commands: Any) -> None:
    trace = _command(commands, "trace", "compute a file's attention step by step and check its claims", _TRACE_EXAMPLES)
    trace.add_argument("file", type=_name, metavar="FILE", help="a .json, .npz or .safetensors file")
    trace.add_argument(
        "--head", type=_whole, metavar="N", help="the head to print, from 0; default: where a claim is wrong, else 0"
    )
    trace.add_argument("--batch", type=_whole, metavar="N", help="the batch entry to print, from 0; default: as --head")
    trace.add_argument(
        "--num-heads",
        type=_name,
        metavar="N,N",
        help="instead of the steps, the layer with each of these numbers of heads, side by side, such as 1,8",
    )
    trace.add_argument(
        "--query", type=_whole, metavar="N", help="whose lengths and angles to print, from 0; default: as --head"
    )
    _files(trace, html=True)
    _languages(trace, argparse.SUPPRESS)


def _diagnose(commands: Any) -> None:
    diagnose = _command(
        commands, "diagnose", "name the mistake in your attention from what it gave", _DIAGNOSE_EXAMPLES
    )
    diagnose.add_argument("file", type=_name, metavar="FILE", help="a .npz, .json, .safetensors or .pt file")
    _files(diagnose, html=False)
    _languages(diagnose, argparse.SUPPRESS)


def _view(commands: Any) -> None:
    about = "look at every head of a long text in the browser (needs an extra, see below)"
    view = _command(commands, "view", about, _VIEW_EXAMPLES)
    view.add_argument(
        "source",
        type=_name,
        metavar="FILE|MODEL",
        nargs="?",
        help="a file of seen.save, or a model; default: the shipped one",
    )
    view.add_argument(
        "--text-file", type=_name, metavar="FILE", help="the text to run through MODEL; - is standard input"
    )
    view.add_argument("--windows", action="store_true", help="with --text-file: cut a long text into windows")
    view.add_argument("--port", type=_whole, default=0, metavar="N", help="the port; default: a free one")
    view.add_argument("--no-open", action="store_true", help="do not open a browser, only say the address")
    _languages(view, argparse.SUPPRESS)


def _bench(commands: Any) -> None:
    about = "check every engine of this machine against the reference, and time it"
    bench = _command(commands, "bench", about, _BENCH_EXAMPLES)
    bench.add_argument("--threads", type=_whole, metavar="N", help="threads for everybody; default: all cores")
    bench.add_argument("--quick", action="store_true", default=None, help=argparse.SUPPRESS)
    bench.add_argument("--device", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    for name in ("peers", "only", "save"):
        bench.add_argument(f"--{name}", type=_name, help=argparse.SUPPRESS)


def contest(values: argparse.Namespace) -> list[str]:
    """The options of `bench` that only the contests in a checkout have, as they were given."""
    found = ["--quick"] if values.quick else []
    for name in ("device", "peers", "only", "save"):
        value = getattr(values, name)
        found += [] if value is None else [f"--{name}", value]
    return found


def _info(commands: Any) -> None:
    info = _command(commands, "info", "say what is installed and which engine runs", _INFO_EXAMPLES)
    info.add_argument("--json", action="store_true", help="as JSON")


def _languages(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument("--lang", choices=("en", "zh"), default=default, help="English or Chinese; default: en")


def _files(parser: argparse.ArgumentParser, *, html: bool) -> None:
    parser.add_argument(
        "--json", type=_name, metavar="FILE", help="write every number to FILE as JSON; - is standard output"
    )
    if html:
        parser.add_argument(
            "--html",
            type=_name,
            metavar="FILE",
            help="write the page that shows it, one self-contained file; - is standard output",
        )


def _name(text: str) -> str:
    """The name of a file or model, or names with commas; not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: leave it out for its default")
    if "\0" in text:
        raise argparse.ArgumentTypeError("it holds a NUL character")
    return text


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # no number, or one of thousands of digits
        raise argparse.ArgumentTypeError(f"expected a whole number, not {_short(text)!r}") from None


def _short(text: str) -> str:
    return text if len(text) <= 30 else text[:30] + "…"


def pairs(given: str) -> list[tuple[str, int]]:
    """Pairs of layer and head from text such as 3.5,7.0. Raises FileError."""
    try:
        parts = [part.rpartition(".") for part in given.split(",")]
        return [(layer, int(head)) for layer, _, head in parts]
    except ValueError:
        raise FileError(f"--exact is {given!r}: expected layer.head pairs.", "--exact 3.5,7.0") from None


def numbers(name: str, given: str) -> list[int]:
    """Whole numbers from text such as 1,8. Raises FileError."""
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 16 for part in parts):
        raise FileError(f"{name} is {shown(given)}: expected whole numbers with commas.", f"{name} 1,8")
    return [int(part) for part in parts]
