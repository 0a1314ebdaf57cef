"""The pages of every public name: what it is called with, and its docstring.

The public names are those of clearhead and of the modules in `modules()`; what their calls return is found from their
annotations. A new name is on the site without an edit here.
"""

import importlib
import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clearhead
from clearhead import errors
from frame.docstrings import inline, markdown

MORE = (
    "hf",
    "vllm",
    "textbook.heads",
    "textbook.why_scale",
    "explaining.learning",
)  # clearhead loads the rest
RETURNED = "reference/returned"
INSIDE = (
    "clearhead.view.",
    "clearhead.ops.matrix_data",
    "clearhead.textbook.page",
)  # classes that are nobody's business


@dataclass(frozen=True)
class Name:
    """A public name: where it is documented, and the object."""

    full: str  # clearhead.torch.activate
    page: str  # reference/clearhead.torch
    value: Any


def modules() -> list[str]:
    """The public modules, clearhead first."""
    return ["clearhead", *sorted(f"clearhead.{part}" for part in (*clearhead._PARTS, *MORE))]


def public(module: Any) -> list[str]:
    """A module's public names: __all__, or what it defines or imports under the same name (`from … import a as a`)."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    source = Path(module.__file__).read_text(encoding="utf-8")
    again = {first for first, second in re.findall(r"^from clearhead\S* import (\w+) as (\w+)$", source, re.M)}
    local = {name for name, value in vars(module).items() if _documented(value) and value.__module__ == module.__name__}
    return sorted(name for name in again | local if not name.startswith("_"))


def _documented(value: object) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and bool(value.__doc__)


def names() -> dict[str, Name]:
    """Every public name by its full name, and every class that a call of theirs returns."""
    results: dict[str, Name] = {}
    for module in modules():
        loaded = importlib.import_module(module)
        for name in public(loaded):
            local = f"/{name}" if module == "clearhead" else ""
            full = f"{module}.{name}"
            results[full] = Name(full, f"reference/{module}{local}", getattr(loaded, name))
    known = {id(each.value) for each in results.values()}
    todo = [each.value for each in results.values()]
    while todo:
        for kind in _returned(todo.pop(0)):
            if id(kind) not in known:
                known.add(id(kind))
                todo.append(kind)
                full = _short(kind, results)
                results[full] = Name(full, f"{RETURNED}/{full}", kind)
    return results


def _short(kind: type, taken: dict[str, Name]) -> str:
    """A class that calls return, and nobody imports, by its name alone; of two with one name the second says whose."""
    return f"{kind.__module__.split('.')[1]}.{kind.__name__}" if kind.__name__ in taken else kind.__name__


def _returned(value: Any) -> list[type]:
    """The classes of clearhead in what a callable, or a class's public methods, return."""
    if inspect.isclass(value):
        calls = [_function(results) for _, results in members(value)]
        return [kind for call in calls if call is not None for kind in _returned(call)]
    hint = _hints(value).get("return")
    results: list[type] = []

    def go(hint: Any) -> None:
        if inspect.isclass(hint) and hint.__module__.startswith("clearhead") and not hint.__name__.startswith("_"):
            results.append(hint)
        for part in typing.get_args(hint):
            go(part)

    go(hint)
    return [kind for kind in results if not typing.is_typeddict(kind) and not kind.__module__.startswith(INSIDE)]


def _hints(value: Any) -> dict[str, Any]:
    """A function's annotations; those in quotes by the modules that they name."""
    value = inspect.unwrap(value)
    annotations = dict(getattr(value, "__annotations__", {}))
    for name, hint in annotations.items():
        if isinstance(hint, str):
            annotations[name] = _named(hint, value.__module__)
    return annotations


def _named(hint: str, module: str) -> Any:
    """The class in clearhead that an annotation in quotes names; any other stays a text."""
    source = Path(importlib.import_module(module).__file__ or "").read_text(encoding="utf-8")
    word = re.search(r"\w+", hint)
    home = word and re.search(rf"^\s*from (clearhead\S*) import .*\b{word[0]}\b", source, re.M)
    return getattr(importlib.import_module(home[1]), word[0], hint) if word and home else hint


def members(kind: type) -> list[tuple[str, Any]]:
    """A class's public methods, properties and fields, in the order in which they are written, its own first."""
    results: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("clearhead"):
            about = _comments(base)
            fields = {name: _Field(hint, about.get(name, "")) for name, hint in inspect.get_annotations(base).items()}
            for name, value in (fields | dict(vars(base))).items():
                if name in fields and not isinstance(value, property):
                    value = fields[name]
                if not name.startswith("_"):
                    results.setdefault(name, value)
    return [(name, value) for name, value in results.items() if isinstance(value, _Field) or _function(value)]


@dataclass(frozen=True)
class _Field:
    hint: Any
    about: str  # what the comment behind it says


def _comments(kind: type) -> dict[str, str]:
    """What the comment behind each field of a class says."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return {}
    said = re.findall(r"^    (\w+): [^#\n]*[^#\s]  # (?!type:|noqa)(.*)$", source, re.MULTILINE)
    return {name: re.sub(r"^\([^()]*\)", r"`\g<0>`", text) for name, text in said}  # a shape is code


def _function(value: Any) -> Callable[..., Any] | None:
    """The function behind a method or property."""
    for inside in ("fget", "__func__", "func"):
        value = getattr(value, inside, value)
    return value if inspect.isfunction(value) else None


def pages(names: dict[str, Name]) -> dict[str, str]:
    """All pages of the reference of Python."""
    made: dict[str, str] = {}
    for module in modules():
        some = [each for each in names.values() if each.full.rpartition(".")[0] == module]
        about = markdown(importlib.import_module(module).__doc__ or "")
        text = f"# {module}\n\n```{{py:module}} {module}\n```\n\n{about}\n"
        if module == "clearhead":
            text += _listed(some, f"{module}/")
            made |= {each.page: f"# {each.full}\n\n{described(each, names)}" for each in some}
        else:
            text += "\n".join(f"## {each.full.rpartition('.')[2]}\n\n{described(each, names)}" for each in some)
        made[f"reference/{module}"] = text
    some = [each for each in names.values() if each.page.startswith(RETURNED)]
    text = "# What calls return\n\nClasses that nobody makes by hand: calls return them.\n\n"
    made[RETURNED] = text + _listed(some, "returned/")
    made |= {each.page: f"# {each.full.rpartition('.')[2]}\n\n{described(each, names)}" for each in some}
    about = {module: summary(importlib.import_module(module)).removeprefix("clearhead: ") for module in modules()}
    listed = "\n".join(f"- [{module}]({module}.md): {words}" for module, words in about.items())
    inside = "\n".join((*modules(), "returned"))
    made["reference/python"] = (
        "# Python\n\n`import clearhead as ch` loads NumPy only. What needs PyTorch or Transformers is imported "
        f"when it is first used.\n\n{listed}\n- [clearhead.errors](errors.md): what can go wrong.\n"
        "- [What calls return](returned.md)\n\n"
        f"```{{toctree}}\n:hidden:\n\n{inside}\n```\n"
    )
    return made


def _listed(some: list[Name], folder: str) -> str:
    """A table of names with what they are, and their place in the sidebar."""
    rows, inside = "", ""
    for each in sorted(some, key=lambda each: each.full.rpartition(".")[2].lower()):
        file = f"{folder}{each.page.rpartition('/')[2]}"
        title = each.full.rpartition(".")[2]
        rows += f"| [`{title}`]({file}.md) | {summary(each.value)} |\n"
        inside += f"{title} <{file}>\n"
    return f"| name | what it is |\n| --- | --- |\n{rows}\n```{{toctree}}\n:hidden:\n\n{inside}```\n"


def summary(value: Any) -> str:
    """The first line of a docstring."""
    return inline((inspect.getdoc(value) or "").split("\n")[0]) if _documented(value) or inspect.ismodule(value) else ""


def described(name: Name, names: dict[str, Name]) -> str:
    """A name's signature and docstring, and those of what it has."""
    (module, _, last), value = name.full.rpartition("."), name.value
    options, text = {"module": module}, inspect.getdoc(value) or ""
    if inspect.isclass(value):
        by_hand = not (name.page.startswith(RETURNED) or "made by `" in text.partition("\n")[0])
        made = signature(value, names) if by_hand else ""
        text = _directive("py:class", last + made, text, options, fence=":::::")
        inner = "\n".join(_member(member, result, names) for member, result in members(value))
        return text.replace("<!-- members -->", inner).replace("<!-- methods -->\n", _methods(name))
    if inspect.isfunction(value):
        return _directive("py:function", last + signature(value, names), text, options)
    return _directive("py:data", last, f"`{value!r}`" if len(repr(value)) < 400 else "", options)


def _methods(name: Name) -> str:
    """A table of what a class can be asked, each with the first line of its docstring."""
    rows = [
        f"| {{py:obj}}`{member} <{name.full}.{member}>` | {summary(function)} |"
        for member, value in members(name.value)
        if (function := _function(value)) and function.__doc__
    ]
    return "\n".join(("| name | what it is |", "| --- | --- |", *rows, "", "")) if len(rows) > 2 else ""


def _member(name: str, value: Any, names: dict[str, Name]) -> str:
    if isinstance(value, _Field):
        return _directive("py:attribute", name, value.about, {"type": typed(value.hint, names)}, fence="::::")
    function = _function(value)
    text = inspect.getdoc(function) or ""
    if not isinstance(value, (staticmethod, classmethod)) and not inspect.isfunction(value):
        kind = typed(getattr(function, "__annotations__", {}).get("return"), names)
        return _directive("py:property", name, text, {"type": kind}, fence="::::")
    bound = not isinstance(value, staticmethod)
    options = {} if inspect.isfunction(value) else {"classmethod" if bound else "staticmethod": "-"}
    return _directive("py:method", name + signature(function, names, bound=bound), text, options, fence="::::")


def _directive(kind: str, what: str, text: str, options: dict[str, str] | None = None, fence: str = "::::") -> str:
    """One directive of Sphinx's Python domain."""
    inputs = "".join(f":{key}: {value}\n".replace(": -\n", ":\n") for key, value in (options or {}).items() if value)
    made = markdown(text, example_first=True) if text else ""
    if fence == ":::::":
        opening = re.match(r"(.*?\n\n(?:```pycon\n.*?\n```\n\n?)*)(.*)", f"{made}\n", re.DOTALL)
        made = f"{opening[1]}<!-- methods -->\n{opening[2]}\n<!-- members -->\n" if opening else made
    return f"{fence}{{{kind}}} {what}\n{inputs}\n{made}{fence}\n"


def signature(call: Any, names: dict[str, Name], *, bound: bool = False) -> str:
    """What a callable takes and returns, with short names of types."""
    try:
        result = inspect.signature(call)
    except (TypeError, ValueError):
        return "()"
    parts, star = [], False
    for place, each in enumerate(result.parameters.values()):
        if bound and place == 0:
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        star = star or each.kind is each.VAR_POSITIONAL
        mark = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        kind = "" if each.kind is each.VAR_KEYWORD else typed(each.annotation, names)
        part = f"{mark}{each.name}: {kind}" if kind else f"{mark}{each.name}"
        if each.default is not each.empty:
            part += (" = " if kind else "=") + _default(each.default)
        parts.append(part)
    kind = "" if inspect.isclass(call) else typed(result.return_annotation, names)
    return f"({', '.join(parts)})" + (f" -> {kind}" if kind and kind != "None" else "")


def _default(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)


def typed(hint: Any, names: dict[str, Name]) -> str:
    """A type as readers want it: nothing for Any, the full name of a class that has a page, the last name of others."""
    if hint is inspect.Signature.empty or hint is Any or hint in ("Any", None):
        return ""
    text = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    text = re.sub(r"ForwardRef\('([^']*)'[^)]*\)", r"\1", text).replace("'", '"') if "ForwardRef" in text else text
    text = text.replace("numpy.dtype", "np.dtype")  # else it is taken for an attribute of the class
    text = re.sub(r"(numpy\.)?ndarray\[[^\[\]]*(\[[^\[\]]*\])?\]", "np.ndarray", text)
    homes = {f"{each.value.__module__}.{each.value.__qualname__}": full for full, each in _classes(names).items()}
    ends = {home.rpartition(".")[2]: full for home, full in homes.items()}

    def short(result: re.Match[str]) -> str:
        home, _, last = result[0].rpartition(".")
        if home in ("np", "torch"):
            return result[0]
        return homes.get(result[0], last) if home else ends.get(last, last)

    if isinstance(hint, str) and not re.fullmatch(r"[\w.\[\], |\"']+", text):
        return ""
    return re.sub(r"(?<![\"'\w])[A-Za-z_][\w.]*(?![\w\"'])", short, text)


def _classes(names: dict[str, Name]) -> dict[str, Name]:
    return {full: each for full, each in names.items() if inspect.isclass(each.value)}


def linked(code: str, names: dict[str, Name]) -> str:
    """Code in backticks as a link to the name's page, where it is a public name: `ch.cut`, `ch.watch(…)`, `A.top`."""
    result = re.fullmatch(r"`(?:ch|clearhead)\.([\w.]+)((?:\(.*\))?)`", code)
    if result and f"clearhead.{result[1]}" in names:
        return f"{{py:obj}}`{code.strip('`')} <clearhead.{result[1]}>`"
    return code


def linked_text(text: str, names: dict[str, Name]) -> str:
    """A generated page whose code in backticks, and whose errors, lead to the pages of names; its own fences stay."""
    bare = {full.removeprefix("clearhead."): full for full in names if not full.removeprefix("clearhead.").count(".")}

    def link(result: re.Match[str]) -> str:
        role, code, error = result.groups()
        if error:
            return f"{{py:exc}}`{error} <clearhead.errors.{error}>`" if hasattr(errors, error) else error
        if role or code not in bare:
            return result[0] if role else linked(result[0], names)
        return f"{{py:obj}}`{code} <{bare[code]}>`"

    lines, inside = text.split("\n"), False
    for place, line in enumerate(lines):
        if line.startswith("```"):
            inside = not inside
        elif not inside and not line.startswith(("|", "#", "::")):
            lines[place] = re.sub(r"(\{[\w:]+\})?`([^`]+)`|\b([A-Z]\w*Error)\b", link, line)
    return "\n".join(lines)
