"""The command line's arguments: those of every command, their help, and their errors."""

import argparse
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn
from unicodedata import east_asian_width

from clearhead.errors import FileError, Sentence, expected
from clearhead.report.streams import can_show, complain, in_language
from clearhead.version import __version__
from clearhead.words import LANGUAGES, Language, table

_IN_ENGLISH = ("bench", "info")  # commands without --lang


class _Parser(argparse.ArgumentParser):
    """The parser of the program, or of one of its commands, which argparse makes of the same class.

    What it says of itself and of each option is in words/help.toml, under the command's name and the option's.
    """

    def __init__(self, language: Language, command: str = "clearhead", **options: Any) -> None:
        self.language, self.command = language, command
        about = self.words(command)
        options["description"] = f"{about}。" if language == "zh" else f"{about[0].upper()}{about[1:]}."
        options["epilog"] = self.words(f"{command} below")
        options["formatter_class"] = _ChineseHelp if language == "zh" else argparse.RawDescriptionHelpFormatter
        super().__init__(**options, add_help=False)
        for group in (self._positionals, self._optionals):
            group.title = self.words(group.title or "")
        self.add_argument("-h", "--help", action="help")

    def words(self, *keys: str) -> str:
        """The sentence of the first of these keys that has one."""
        sentences = table("help")
        return sentences[next(key for key in keys if key in sentences)][self.language]

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """An option or a positional argument, with its help."""
        if "help" not in options:
            options["help"] = self.words(f"{self.command} {names[0]}", names[0])
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2; argparse would print the usage before it."""
        said = in_language(self.language, message)
        end = "." if said == message else "。"
        complain(
            self.prog, f"{said}{end}", Sentence("{program} --help shows examples.", program=self.prog), self.language
        )
        sys.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Let an error of writing the help be raised; argparse would ignore it."""
        (file or sys.stdout).write(message)


class _ChineseHelp(argparse.RawDescriptionHelpFormatter):
    """Help whose lines break where a terminal's columns end: a Chinese character takes two."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, table("help")["usage"]["zh"] if prefix is None else prefix)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return broken(text, width)

    def format_help(self) -> str:
        text = super().format_help()
        for title in ("options", "positional arguments"):  # argparse puts its own colon there
            chinese = table("help")[title]["zh"]
            text = text.replace(f"\n{chinese}:\n", f"\n{chinese}：\n")
        return text


def read(arguments: list[str]) -> argparse.Namespace:
    """The arguments as values; exits with code 2 and one line about what is wrong."""
    language = _language(arguments)
    parser = command_line(language)
    first = arguments[0] if arguments else ""
    if first.startswith("-") and not any(first.startswith(known) for known in ("-h", "--h", "--v", "--l")):
        misplaced = "{option} stands before the command: options go after it, as in clearhead explain … {option}"
        parser.error(Sentence(misplaced, option=first))
    options = parser.parse_args(arguments)
    if options.lang is not None and options.command in _IN_ENGLISH:
        values = {"language": options.lang, "command": options.command}
        parser.error(Sentence("--lang {language}: {command} prints English only", **values))
    options.lang = language
    options.usage = parser.print_help
    return options


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
    parser = _Parser(language, prog="clearhead")
    parser.add_argument("--version", action="version", version=f"clearhead {__version__}")
    _languages(parser, None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, add in _COMMANDS.items():
        add(commands.add_parser(name, help=parser.words(name), language=language, command=name))
    return parser


def _explain(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("text", metavar="TEXT", nargs="?")
    explain.add_argument("--file", type=_name, metavar="FILE")
    explain.add_argument("--windows", action="store_true")
    explain.add_argument("--exact", type=_name, metavar="L.H,…")
    explain.add_argument("--dtype", type=_name, metavar="NAME")
    explain.add_argument("--model", type=_name, metavar="DIR|NAME")
    explain.add_argument("--layer", type=_whole, metavar="N")
    explain.add_argument("--head", type=_whole, metavar="N")
    explain.add_argument("--token", type=_name, metavar="N|WORD")
    explain.add_argument("--generate", type=_whole, default=0, metavar="N")
    _edit(explain, "cut", "Q>K[@L.H]")
    _edit(explain, "boost", "K=X[@L.H]")
    _edit(explain, "off", "L.H,…", nargs="?", const=("off", ""))
    explain.add_argument("--why", type=_name, nargs="?", const=True, metavar="TOKEN")
    explain.add_argument("--against", type=_name, metavar="TOKEN")
    _files(explain, "--json", "--html")
    _languages(explain)


def _edit(explain: argparse.ArgumentParser, name: str, form: str, **more: Any) -> None:
    """An option that adds its name and value to `edits`, so that edits keep their order."""

    def named(text: str) -> tuple[str, str]:
        return name, text

    explain.add_argument(f"--{name}", dest="edits", action="append", type=named, metavar=form, **more)


def _shapes(shapes: argparse.ArgumentParser) -> None:
    shapes.add_argument("sizes", type=_name, nargs="*", metavar="SIZE")
    _files(shapes, "--json")
    _languages(shapes)


def _scale(scale: argparse.ArgumentParser) -> None:
    scale.add_argument("--widths", type=_name, metavar="N,N,…")
    scale.add_argument("--keys", type=_whole, default=16, metavar="N")
    _files(scale, "--json", "--html")
    _languages(scale)


def _learn(learn: argparse.ArgumentParser) -> None:
    learn.add_argument("--step", type=_whole, metavar="N")
    _files(learn, "--json", "--html")
    _languages(learn)


def _trace(trace: argparse.ArgumentParser) -> None:
    trace.add_argument("file", type=_name, metavar="FILE")
    trace.add_argument("--head", type=_whole, metavar="N")
    trace.add_argument("--batch", type=_whole, metavar="N")
    trace.add_argument("--num-heads", type=_name, metavar="N,N")
    trace.add_argument("--query", type=_whole, metavar="N")
    _files(trace, "--json", "--html")
    _languages(trace)


def _diagnose(diagnose: argparse.ArgumentParser) -> None:
    diagnose.add_argument("file", type=_name, metavar="FILE")
    _files(diagnose, "--json")
    _languages(diagnose)


def _view(view: argparse.ArgumentParser) -> None:
    view.add_argument("source", type=_name, metavar="FILE|MODEL", nargs="?")
    view.add_argument("--text-file", type=_name, metavar="FILE")
    view.add_argument("--windows", action="store_true")
    view.add_argument("--port", type=_whole, default=0, metavar="N")
    view.add_argument("--no-open", action="store_true")
    _languages(view)


def _bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--threads", type=_whole, metavar="N")
    bench.add_argument("--quick", action="store_true", default=None, help=argparse.SUPPRESS)
    bench.add_argument("--device", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    for name in ("peers", "only", "save"):
        bench.add_argument(f"--{name}", type=_name, help=argparse.SUPPRESS)


def _info(info: argparse.ArgumentParser) -> None:
    info.add_argument("--json", action="store_true")


_COMMANDS = {
    "explain": _explain,
    "shapes": _shapes,
    "scale": _scale,
    "learn": _learn,
    "trace": _trace,
    "diagnose": _diagnose,
    "view": _view,
    "bench": _bench,
    "info": _info,
}


def contest(options: argparse.Namespace) -> list[str]:
    """The options of `bench` that only the contests in a checkout have, as they were typed."""
    typed = ["--quick"] if options.quick else []
    for name in ("device", "peers", "only", "save"):
        value = getattr(options, name)
        typed += [] if value is None else [f"--{name}", value]
    return typed


def _languages(parser: argparse.ArgumentParser, default: str | None = argparse.SUPPRESS) -> None:
    parser.add_argument("--lang", choices=LANGUAGES, default=default)


def _files(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_argument(name, type=_name, metavar="FILE")


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


def pairs(text: str) -> list[tuple[str, int]]:
    """Pairs of layer and head from text such as 3.5,7.0. Raises FileError."""
    try:
        parts = [part.rpartition(".") for part in text.split(",")]
        return [(layer, int(head)) for layer, _, head in parts]
    except ValueError:
        raise FileError("--exact is {value!r}: expected layer.head pairs.", "--exact 3.5,7.0", value=text) from None


def numbers(name: str, text: str) -> list[int]:
    """Whole numbers from text such as 1,8. Raises FileError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 16 for part in parts):
        raise FileError(expected(name, text, "whole numbers with commas"), "{name} 1,8", name=name)
    return [int(part) for part in parts]


def of_locale(environment: Mapping[str, str] = os.environ) -> str:
    """The language that a process's locale asks for, "en" or "zh", as gettext reads it."""
    locale = next(filter(None, map(environment.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "C")
    if locale.partition(".")[0] in ("C", "POSIX"):  # then LANGUAGE does not count
        return "en"
    return "zh" if (environment.get("LANGUAGE") or locale).lower().startswith("zh") else "en"


def columns(text: str) -> int:
    """How many columns of a terminal the text takes."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def broken(text: str, width: int) -> list[str]:
    """Chinese text in lines of at most `width` columns; not within a name, and not before punctuation."""
    lines = [""]
    for part in re.findall(r"(?:[\x21-\x7e]+|[^\x21-\x7e])[，。；：、）]*\s*", text):
        if lines[-1] and columns(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]
