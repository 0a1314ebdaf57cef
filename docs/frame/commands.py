"""The pages of every command, from the parsers themselves: usage, options, and what stands below the help."""

import argparse
import re
from textwrap import fill

from clearhead.arguments import command_line
from clearhead.words import Language
from frame.docstrings import inline

CODES = {
    "en": """
Data goes to standard output, messages about problems to standard error. Exit codes: 0 success, 1 a claim in a traced
file is wrong or a mistake was found, 2 bad input or output that cannot be written, 3 no known mistake explains the
numbers, 130 interrupted.
""",
    "zh": """
数据写到标准输出，问题写到标准错误。退出码：0 成功，1 算例中有错或找到了错误，2 输入有误或无法写出，3
没有已知的错误能解释这些数字，130 被中断。
""",
}
TITLE = {"en": "Commands", "zh": "命令"}
COLUMNS = {"en": "command | what it does", "zh": "命令 | 用途"}
EXAMPLES = {"examples:": "Examples", "示例：": "示例"}


def pages(language: Language) -> dict[str, str]:
    """A page for each command, and one that lists them."""
    parser = command_line(language)
    commands = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    shown = {each.dest: inline(each.help or "") for each in commands._choices_actions}
    rows = "".join(f"| [`{name}`](commands/{name}.md) | {about} |\n" for name, about in shown.items())
    inside = "\n".join(f"{name} <commands/{name}>" for name in commands.choices)
    top = f"# {TITLE[language]}\n\n{inline(parser.description or '')}\n\n{usage(parser)}\n\n{options(parser)}"
    top += f"{CODES[language]}\n| {COLUMNS[language]} |\n| --- | --- |\n{rows}\n"
    top += f"```{{toctree}}\n:hidden:\n\n{inside}\n```\n"
    return {"reference/commands": top} | {
        f"reference/commands/{name}": page(name, each) for name, each in commands.choices.items()
    }


def page(name: str, parser: argparse.ArgumentParser) -> str:
    """One command's page."""
    text = f"# clearhead {name}\n\n{inline(parser.description or '')}\n\n{usage(parser)}\n\n{options(parser)}"
    return f"{text}\n{below(parser.epilog or '')}"


def usage(parser: argparse.ArgumentParser) -> str:
    """How the command is called."""
    words = " ".join(parser.format_usage().removeprefix("usage: ").removeprefix("用法：").split())
    whole = re.sub(r"\[-[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]", lambda option: option[0].replace(" ", "\0"), words)
    return f"```text\n{fill(whole, 76, subsequent_indent='    ', break_on_hyphens=False).replace(chr(0), ' ')}\n```"


def options(parser: argparse.ArgumentParser) -> str:
    """Arguments and options with their help, each with an anchor of its own."""
    text = f"```{{program}} {parser.prog}\n```\n\n"
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        value = _value(action)
        names = ", ".join(f"{name}{value and f' {value}'}" for name in action.option_strings) or value
        shown = inline(str(action.help or "").replace("%(default)s", str(action.default)))
        text += f"::::{{option}} {names}\n\n{shown}\n::::\n\n"
    return text


def _value(action: argparse.Action) -> str:
    """An option's value as the help has it."""
    if action.nargs == 0:
        return ""
    name = action.metavar if isinstance(action.metavar, str) else ""
    return name or "|".join(map(str, action.choices or ())) or action.dest.upper()


def below(text: str) -> str:
    """What stands below the help: examples, and what else is said."""
    parts = re.split(r"\n\n", text.strip())
    made = ""
    for part in parts:
        title, _, rest = part.partition("\n")
        if title in EXAMPLES:
            lines = "\n".join(line.strip() for line in rest.splitlines())
            made += f"## {EXAMPLES[title]}\n\n```sh\n{lines}\n```\n\n"
        elif part:
            made += f"```text\n{part}\n```\n\n"
    return made
