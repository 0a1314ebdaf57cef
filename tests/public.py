"""The public names: those of clearhead and of its public modules, and every class that a call of theirs returns."""

import importlib
import inspect
import re
import typing
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import clearhead

MORE = ("hf", "vllm", "textbook.costs", "textbook.why_scale", "explaining.learning")  # clearhead loads the rest
INSIDE = tuple(
    f"clearhead.{part}" for part in ("view.", "core.call", "core.state", "engines.base", "textbook.page")
)  # nobody's business
MODULES = ("clearhead", *(f"clearhead.{part}" for part in (*clearhead._PARTS, *MORE)))


@cache
def names() -> dict[str, Any]:
    """What a user imports, by its full name, such as clearhead.torch.activate."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    return {f"{name}.{local}": getattr(module, local) for name, module in modules.items() for local in public(module)}


def public(module: Any) -> list[str]:
    """A module's public names: __all__, or what it defines or imports under the same name (`from … import a as a`)."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    source = Path(module.__file__).read_text(encoding="utf-8")
    again = {first for first, second in re.findall(r"^from clearhead\S* import (\w+) as (\w+)$", source, re.M)}
    kinds = (name for name, value in vars(module).items() if inspect.isclass(value) or inspect.isfunction(value))
    local = {name for name in kinds if getattr(module, name).__module__ == module.__name__}
    return sorted(name for name in again | local if not name.startswith("_"))


@cache
def returned() -> list[type]:
    """The classes that nobody imports and that calls return, those of their methods too."""
    done, todo = list(names().values()), list(names().values())
    while todo:
        new = [kind for kind in _returned(todo.pop(0)) if not any(kind is one for one in done)]
        done += new
        todo += new
    return done[len(names()) :]


def _returned(value: Any) -> list[type]:
    if inspect.isclass(value):
        calls = [function(member) for member in members(value).values()]
        return list(dict.fromkeys(kind for call in calls if call is not None for kind in _returned(call)))
    value, results = inspect.unwrap(value), []
    hint = getattr(value, "__annotations__", {}).get("return")

    def go(hint: Any) -> None:
        if inspect.isclass(hint) and hint.__module__.startswith("clearhead") and not hint.__name__.startswith("_"):
            results.append(hint)
        for part in typing.get_args(hint):
            go(part)

    go(_named(hint, value.__module__) if isinstance(hint, str) else hint)
    return [kind for kind in results if not typing.is_typeddict(kind) and not kind.__module__.startswith(INSIDE)]


def _named(hint: str, module: str) -> Any:
    """The class in clearhead that an annotation in quotes names; any other stays a text."""
    source = Path(importlib.import_module(module).__file__ or "").read_text(encoding="utf-8")
    word = re.search(r"\w+", hint)
    home = word and re.search(rf"^\s*from (clearhead\S*) import .*\b{word[0]}\b", source, re.M)
    return getattr(importlib.import_module(home[1]), word[0], hint) if word and home else hint


def members(kind: type) -> dict[str, Any]:
    """A class's public methods and properties, its own first."""
    results: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("clearhead"):
            results = vars(base) | results
    return {name: value for name, value in results.items() if not name.startswith("_") and function(value)}


def function(value: Any) -> Callable[..., Any] | None:
    """The function behind a method or property."""
    for inside in ("fget", "__func__", "func"):
        value = getattr(value, inside, value)
    return value if inspect.isfunction(value) else None
