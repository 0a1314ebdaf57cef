"""The command line's arguments: those of every command, their help, and their errors."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from clearhead import __version__
from clearhead.errors import FileError, shown
from clearhead.report.streams import can_show, complain, in_language
from clearhead.words import LANGUAGES, Language
from clearhead.words.examples import BELOW
from clearhead.words.help import CHINESE, broken, of_locale

_IN_ENGLISH = ("bench", "info")  # commands without --lang


class _Parser(argparse.ArgumentParser):
    language: Language = "en"

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2; argparse would print the usage before it."""
        said = in_language(self.language, message)
        end = "." if said == message else "。"
        complain(self.prog, f"{said}{end}", f"{self.prog} --help shows examples.", self.language)
        sys.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Let an error of writing the help be raised; argparse would ignore it."""
        (file or sys.stdout).write(message)


class _ChineseParser(_Parser):
    """Its help and errors are in Chinese, and so are those of its commands, which argparse makes of the same class."""

    language: Language = "zh"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"formatter_class": _ChineseHelp, "add_help": False})
        for group in (self._positionals, self._optionals):
            group.title = CHINESE[group.title or ""]
        self.add_argument("-h", "--help", action="help", help="show this help message and exit")

    def add_argument(self, *names: Any, **options: Any) -> Any:
        about = options.get("help", argparse.SUPPRESS)
        return super().add_argument(*names, **options | {"help": CHINESE.get(about, about)})


class _ChineseHelp(argparse.RawDescriptionHelpFormatter):
    """Help whose lines break where a terminal's columns end: a Chinese character takes two."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, CHINESE["usage: "] if prefix is None else prefix)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return broken(text, width)

    def format_help(self) -> str:
        found = super().format_help()
        for title in ("options", "positional arguments"):  # argparse puts its own colon there
            found = found.replace(f"\n{CHINESE[title]}:\n", f"\n{CHINESE[title]}：\n")
        return found


def given(arguments: list[str]) -> argparse.Namespace:
    """The arguments as values; exits with code 2 and one line about what is wrong."""
    language = _language(arguments)
    parser = command_line(language)
    first = arguments[0] if arguments else ""
    if first.startswith("-") and not any(first.startswith(known) for known in ("-h", "--h", "--v", "--l")):
        parser.error(f"{first} stands before the command: options go after it, as in clearhead explain … {first}")
    values = parser.parse_args(arguments)
    if values.lang is not None and values.command in _IN_ENGLISH:
        parser.error(f"--lang {values.lang}: {values.command} prints English only")
    values.lang = language
    values.usage = parser.print_help
    return values


def _language(arguments: list[str]) -> Language:
    """That of --lang, or of the locale where standard output can show it."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--lang", nargs="?")
    asked = parser.parse_known_args(arguments)[0].lang
    if asked in LANGUAGES:
        return asked
    return "zh" if of_locale() == "zh" and can_show("zh") else "en"


def command_line(language: Language = "en") -> argparse.ArgumentParser:
    """The parser of all commands; its help in the language asked for."""
    kind = _ChineseParser if language == "zh" else _Parser
    parser = kind(prog="clearhead", **_told(language, "", "exact attention, with weights that stay visible"))
    version: dict[str, Any] = {"action": "version", "version": f"clearhead {__version__}"}
    parser.add_argument("--version", **version, help="show program's version number and exit")
    _languages(parser, None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, about: str) -> argparse.ArgumentParser:
        listed = CHINESE[about] if language == "zh" else about
        return commands.add_parser(name, help=listed, **_told(language, name, about))

    for add in (_explain, _shapes, _scale, _learn, _trace, _diagnose, _view, _bench, _info):
        add(command)
    return parser


Command = Callable[[str, str], argparse.ArgumentParser]  # makes a command's parser from its name and what it does


def _told(language: Language, name: str, about: str) -> dict[str, Any]:
    """What stands above and below a command's options."""
    above = f"{CHINESE[about]}。" if language == "zh" else f"{about[0].upper()}{about[1:]}."
    below = BELOW[name][language == "zh"]
    return {"description": above, "epilog": below, "formatter_class": argparse.RawDescriptionHelpFormatter}


def _explain(command: Command) -> None:
    explain = command("explain", "show how one token's attention output came to be")
    explain.add_argument("text", metavar="TEXT", nargs="?", help="the text to run through the model")
    explain.add_argument(
        "--file",
        type=_name,
        metavar="FILE",
        help="read the text from FILE (- is standard input) without its last newline; with --html, every head",
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
        "--layer", type=_whole, metavar="N", help="the layer, from 0; default: that of the head with the least entropy"
    )
    explain.add_argument(
        "--head", type=_whole, metavar="N", help="the head, from 0; default: the one with the least entropy"
    )
    explain.add_argument(
        "--token", type=_name, metavar="N|WORD", help="whose output: a position or a word; default: the last token"
    )
    explain.add_argument(
        "--generate",
        type=_whole,
        default=0,
        metavar="N",
        help="first let the model continue the text by N tokens",
    )
    _edit(explain, "cut", "Q>K[@L.H]", "run the text also with queries Q not seeing keys K, and compare (see below)")
    _edit(explain, "boost", "K=X[@L.H]", "run it also with X added to the logits of keys K, and compare")
    off = "run it also with these heads' outputs set to 0, and compare; without a value: those of --layer and --head"
    _edit(explain, "off", "L.H,…", off, nargs="?", const=("off", ""))
    explain.add_argument(
        "--why",
        type=_name,
        nargs="?",
        const=True,
        metavar="TOKEN",
        help="why TOKEN comes next: what the edges, tokens and heads behind it did; default: the likeliest",
    )
    explain.add_argument(
        "--against",
        type=_name,
        metavar="TOKEN",
        help="with --why: the token to compare with; default: the likeliest other one",
    )
    _files(explain, html=True)
    _languages(explain, argparse.SUPPRESS)


def _edit(explain: argparse.ArgumentParser, name: str, form: str, about: str, **more: Any) -> None:
    """An option that adds its name and value to `edits`, so that edits keep their order."""

    def named(text: str) -> tuple[str, str]:
        return name, text

    explain.add_argument(f"--{name}", dest="edits", action="append", type=named, metavar=form, help=about, **more)


def _shapes(command: Command) -> None:
    shapes = command("shapes", "print the shape and cost of every step of a layer")
    shapes.add_argument("sizes", type=_name, nargs="*", metavar="SIZE", help="n=12, or n for a symbol (see below)")
    _files(shapes, html=False)
    _languages(shapes, argparse.SUPPRESS)


def _scale(command: Command) -> None:
    scale = command("scale", "show with numbers why scores are divided by √d_k")
    scale.add_argument("--widths", type=_name, metavar="N,N,…", help="the values of d_k; default: 1,4,16,64,256")
    scale.add_argument("--keys", type=_whole, default=16, metavar="N", help="keys of each query; default: 16")
    _files(scale, html=True)
    _languages(scale, argparse.SUPPRESS)


def _learn(command: Command) -> None:
    learn = command("learn", "watch a small model learn W_Q, W_K and W_V")
    learn.add_argument(
        "--step",
        type=_whole,
        metavar="N",
        help="the training step to show, or the recorded one before it; default: the last",
    )
    _files(learn, html=True)
    _languages(learn, argparse.SUPPRESS)


def _trace(command: Command) -> None:
    trace = command("trace", "compute a file's attention step by step and check its claims")
    trace.add_argument("file", type=_name, metavar="FILE", help="a .npz, .json, .safetensors or .pt file")
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


def _diagnose(command: Command) -> None:
    diagnose = command("diagnose", "name the mistake in your attention code from its result")
    diagnose.add_argument("file", type=_name, metavar="FILE", help="a .npz, .json, .safetensors or .pt file")
    _files(diagnose, html=False)
    _languages(diagnose, argparse.SUPPRESS)


def _view(command: Command) -> None:
    about = "look at every head of a long text in the browser (needs an extra, see below)"
    view = command("view", about)
    view.add_argument(
        "source",
        type=_name,
        metavar="FILE|MODEL",
        nargs="?",
        help="a file that seen.save wrote, or a model; default: the shipped one",
    )
    view.add_argument(
        "--text-file", type=_name, metavar="FILE", help="the text to run through MODEL; - is standard input"
    )
    view.add_argument("--windows", action="store_true", help="with --text-file: cut a long text into windows")
    view.add_argument("--port", type=_whole, default=0, metavar="N", help="the port; default: a free one")
    view.add_argument("--no-open", action="store_true", help="do not open a browser, only print the address")
    _languages(view, argparse.SUPPRESS)


def _bench(command: Command) -> None:
    about = "check every engine of this machine against the reference, and time it"
    bench = command("bench", about)
    bench.add_argument("--threads", type=_whole, metavar="N", help="threads for each engine; default: all cores")
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


def _info(command: Command) -> None:
    info = command("info", "say what is installed and which engine runs")
    info.add_argument("--json", action="store_true", help="as JSON")


def _languages(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument(
        "--lang", choices=("en", "zh"), default=default, help="English or Chinese; default: that of the locale"
    )


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
