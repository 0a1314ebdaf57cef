"""The command line's arguments: options of every command, their help, and their errors."""

import argparse
import re
import sys
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, NoReturn

from clearhead.errors import FileError
from clearhead.report.streams import can_show, complain
from clearhead.spelling import breaks, cells
from clearhead.version import __version__
from clearhead.words import LANGUAGES, Language, of_locale, table

_IN_ENGLISH = ("bench", "info")  # commands without --lang


class _Parser(argparse.ArgumentParser):
    """The parser of the program or of one of its commands, for which argparse uses the same class.

    The help of commands, options and groups is in words/help.toml, under their names.
    """

    def __init__(self, language: Language, command: str = "clearhead", **options: Any) -> None:
        self.language, self.command = language, command
        self.group: Any = super()  # where options go until a group begins
        options["usage"] = table("help").get(f"{command} usage", {}).get(language)
        about = self.words(command)
        options["description"] = f"{about}。" if language == "zh" else f"{about[0].upper()}{about[1:]}."
        options["epilog"] = self.words(f"{command} below")
        options["formatter_class"] = _ChineseHelp if language == "zh" else argparse.RawDescriptionHelpFormatter
        super().__init__(**options, add_help=False)
        for group in (self._positionals, self._optionals):
            group.title = self.words(f"{command} {group.title}", group.title or "")

    def words(self, *keys: str) -> str:
        """The sentence of the first of these keys that words/help.toml has."""
        sentences = table("help")
        return sentences[next(key for key in keys if key in sentences)][self.language]

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """Add an option or a positional argument, with its help, to the group that it begins or that is open."""
        if title := table("help").get(f"{self.command} from {names[0]}"):
            self.group = self.add_argument_group(title[self.language])
        return self.group.add_argument(*names, help=self.words(f"{self.command} {names[0]}", names[0]), **options)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2; argparse would print the usage first."""
        complain(self.prog, f"{message}. hint: {self.prog} --help shows examples.")
        sys.exit(2)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write the help; unlike argparse's own method, raise if writing fails."""
        (file or sys.stdout).write(message)


class _ChineseHelp(argparse.RawDescriptionHelpFormatter):
    """A help formatter that breaks lines by a terminal's columns, of which a Chinese character takes two."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, table("help")["usage"]["zh"] if prefix is None else prefix)

    def _split_lines(self, text: str, width: int) -> list[str]:
        ends = [*breaks(text, width), len(text)]
        return [text[start:end].rstrip() for start, end in pairwise([0, *ends])]

    def format_help(self) -> str:
        return re.sub(
            r"^(\S+):$", r"\1：", super().format_help(), flags=re.MULTILINE
        )  # argparse writes an ASCII colon there


def _name(text: str) -> str:
    """Read the name of a file or model, or several separated by commas; not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty: leave it out for its default")
    if "\0" in text:
        raise argparse.ArgumentTypeError("it holds a NUL character")
    return text


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # no number, or one of thousands of digits
        short = text if len(text) <= 30 else text[:30] + "…"
        raise argparse.ArgumentTypeError(f"expected a whole number, not {short!r}") from None


def _numbers(text: str) -> list[int]:
    """Read whole numbers separated by commas, such as 1,8."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 16 for part in parts):
        raise argparse.ArgumentTypeError(f"expected whole numbers separated by commas, such as 1,8, not {text[:30]!r}")
    return [int(part) for part in parts]


def _text(metavar: str, **more: Any) -> dict[str, Any]:
    return {"type": _name, "metavar": metavar, **more}


def _edit(name: str, form: str, **more: Any) -> dict[str, Any]:
    """An option that appends its name and value to `edits`, which keeps the order of edits."""
    return {"dest": "edits", "action": "append", "type": lambda text: (name, text), "metavar": form, **more}


_FILE, _WHOLE, _FLAG = _text("FILE"), {"type": _whole, "metavar": "N"}, {"action": "store_true"}
_RESULTS = {"--json": _FILE, "--html": _FILE}
_COMMANDS: dict[str, dict[str, dict[str, Any]]] = {
    "explain": {
        "text": {"metavar": "TEXT", "nargs": "?"},
        "--file": _FILE,
        "--chat": _text("MESSAGE"),
        "--system": _text("MESSAGE"),
        "--model": _text("PATH|NAME"),
        "--generate": {**_WHOLE, "default": 0},
        "--why": _text("TOKEN", nargs="?", const=True),
        "--answer": _text("ANSWER"),
        "--word": _text("WORD"),
        "--against": _text("TOKEN"),
        "--parts": {"choices": ("tokens", "words", "sentences", "paragraphs", "turns"), "metavar": "KIND"},
        "--trust": _FLAG,
        "--steps": _FLAG,
        "--way": _FLAG,
        "--all": _FLAG,
        "--layer": _WHOLE,
        "--head": _WHOLE,
        "--token": _text("N|WORD"),
        "--cut": _edit("cut", "Q>K[@L.H]"),
        "--boost": _edit("boost", "K=X[@L.H]"),
        "--off": _edit("off", "L.H,…", nargs="?", const=("off", "")),
        "--rest": {"choices": ("renormalise", "first"), "metavar": "WHERE"},
        **_RESULTS,
    },
    "models": {"--json": _FLAG},
    "view": {
        "model": _text("MODEL", nargs="?"),
        "--file": _FILE,
        "--port": {**_WHOLE, "default": 0},
        "--no-open": _FLAG,
    },
    "serve": {"--model": _text("PATH|NAME"), "--port": {**_WHOLE, "default": 0}, "--no-open": _FLAG},
    "diagnose": {"file": {**_FILE, "nargs": "?"}, "--json": _FILE},
    "trace": {
        "file": {**_FILE, "nargs": "?"},
        "--head": _WHOLE,
        "--batch": _WHOLE,
        "--query": _WHOLE,
        **_RESULTS,
    },
    "shapes": {"sizes": _text("SIZE", nargs="*"), "--sparse": {**_WHOLE, "metavar": "W"}, "--json": _FILE},
    "scale": {"--widths": {"type": _numbers, "metavar": "N,N,…"}, "--keys": {**_WHOLE, "default": 16}, "--json": _FILE},
    "learn": {"--step": _WHOLE, **_RESULTS},
    "bench": {"--threads": _WHOLE},
    "info": {"--json": _FLAG},
}

OF_ANSWER = frozenset(("why", "against", "answer", "word", "parts", "trust", "all"))  # about the answer
EXAMPLE = 'clearhead explain "humpty dumpty sat on"'
_ANY = "|".join(("way", *sorted(OF_ANSWER)))
_LONE = "--{other} explains what follows the whole text, so it cannot go with --{name}."
_MISSING = "expected either TEXT or --file."
_EDITS = "--cut, --boost and --off cannot go with --{name}."
_CONFLICTS = (  # of explain: options that are all set (one of a|b), options none of which is set, the error, its hint
    ("target", "text file chat", "expected TEXT: {token!r} follows --why.", "clearhead explain TEXT --why"),
    ("target answer", "", "--why {token} and --answer are given together.", "leave one of them out."),
    ("", "text file chat", _MISSING, EXAMPLE),
    ("text file", "", _MISSING, EXAMPLE),
    ("text chat", "", "TEXT and --chat are given together.", 'clearhead explain --chat "MESSAGE"'),
    ("system", "chat", "--system needs --chat.", 'clearhead explain --system "be short" --chat "MESSAGE"'),
    (f"{_ANY} token", "", _LONE, "end TEXT with that token."),
    (f"edits {_ANY}|generate|html|steps|token", "", _EDITS, 'clearhead explain TEXT --cut "on>sat"'),
    ("rest", "cut", "--rest needs --cut.", 'clearhead explain TEXT --cut "on>sat" --rest first'),
)
_SHOWN = (  # of explain: a part, options one of which is set, options none of which is set
    ("alone", "token", ""),  # steps without the answer
    ("steps", "steps all", ""),
    ("steps", "layer head", ""),
    ("way", "way all", ""),
    ("answer", " ".join(OF_ANSWER), ""),
)


def asked_for(options: argparse.Namespace) -> set[str]:
    """The options of explain that are set. Raises FileError if two clash."""
    asked = {name for name, value in vars(options).items() if value is not None and value is not False}
    asked -= set() if options.generate else {"generate"}
    asked |= {"target"} if isinstance(options.why, str) else set()
    asked |= {kind for kind, _ in options.edits or ()}
    for together, absent, what, hint in _CONFLICTS:
        chosen = [next((name for name in names.split("|") if name in asked), "") for names in together.split()]
        if all(chosen) and asked.isdisjoint(absent.split()):
            names = {"other": "".join(chosen[:1]), "name": "".join(chosen[-1:]), "token": options.why}
            raise FileError(what.format(**names), hint.format(**names))
    return asked


def shown(asked: set[str]) -> set[str]:
    """The parts that explain shows for these options: "answer", "way", "steps", or "alone" for steps without answer.

    An empty set shows the answer.
    """
    return {
        part
        for part, those, others in _SHOWN
        if not asked.isdisjoint(those.split()) and asked.isdisjoint(others.split("|"))
    }


def read(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments; for wrong ones, print one line and exit with code 2."""
    language = _language(arguments)
    parser = command_line(language)
    first = arguments[0] if arguments else ""
    if first.startswith("-") and not any(first.startswith(known) for known in ("-h", "--h", "--v", "--l")):
        parser.error(f"{first} stands before the command: options go after it, as in clearhead explain … {first}")
    options, others = parser.parse_known_args(arguments)
    if others:
        names = [name[2:] for name in _COMMANDS[options.command] if name.startswith("--")]
        near = get_close_matches(others[0].partition("=")[0].lstrip("-"), names, n=1)
        hint = f"did you mean --{near[0]}?" if near else f"clearhead {options.command} --help shows examples."
        if options.command == "explain" and not others[0].startswith("-"):
            hint = f'quotes make one text of several words: clearhead explain "{" ".join([options.text, *others])}"'
        complain(f"clearhead {options.command}", f"unrecognized arguments: {' '.join(others)}. hint: {hint}")
        sys.exit(2)
    if options.lang is not None and options.command in _IN_ENGLISH:
        parser.error(f"--lang {options.lang}: {options.command} prints English only")
    options.lang = language
    return options


def _language(arguments: list[str]) -> Language:
    """The language of --lang, or of the locale if standard output can show it."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--lang", nargs="?")
    asked = parser.parse_known_args(arguments)[0].lang
    if asked in LANGUAGES:
        return asked
    return "zh" if of_locale() == "zh" and can_show("zh") else "en"


def command_line(language: Language = "en") -> argparse.ArgumentParser:
    """Make the parser of all commands, with help in this language."""
    parser = _Parser(language, prog="clearhead")
    parser.add_argument("--version", action="version", version=f"clearhead {__version__}")
    parser.add_argument("--lang", choices=LANGUAGES)
    parser.add_argument("-h", "--help", action="help")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="clearhead")
    for name, arguments in _COMMANDS.items():
        command = commands.add_parser(name, help=parser.words(name), language=language, command=name)
        for argument, options in arguments.items():
            command.add_argument(argument, **options)
        if name not in _IN_ENGLISH:
            command.add_argument("--lang", choices=LANGUAGES, default=argparse.SUPPRESS)
        command.add_argument("-h", "--help", action="help")
    return parser


def columns(text: str) -> int:
    """How many columns of a terminal the text takes."""
    return sum(cells(text))
