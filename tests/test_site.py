"""The site: what docs/conf.py makes of links and docstrings, and (slow) all of it, built without a warning."""

import importlib.util
import re
import warnings
import zlib
from concurrent.futures import ProcessPoolExecutor
from inspect import getdoc
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

import clearhead as ch
import public
from clearhead import errors
from clearhead.arguments import command_line
from clearhead.core.rules import RULES
from clearhead.core.statistics import listed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCES = {"en": [str(DOCS)], "zh": ["-c", str(DOCS), "-D", "language=zh_CN", str(DOCS / "zh")]}


@pytest.fixture(scope="module")
def conf():
    spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_link_to_the_other_language_leads_to_where_it_is_built(conf):
    def linked(folder, name, text):
        source = [text]
        conf.to_other_language(SimpleNamespace(srcdir=folder), name, source)
        return source[0]

    change = '<a href="../../en/change.html#x">a</a> [b](2-shapes.md)'
    assert linked(DOCS / "zh", "lessons/1-one-head", "[a](../../change.md#x) [b](2-shapes.md)") == change
    assert linked(DOCS, "index", "[a](zh/index.md) [b](matrix.md)") == '<a href="../zh/index.html">a</a> [b](matrix.md)'
    assert linked(DOCS, "index", "[a](../CONTRIBUTING.md)") == "a (`CONTRIBUTING.md`)"


def test_a_docstring_keeps_its_tables_and_examples(conf):
    text = "What it is; a_ij * b.\n\nq, k   the inputs,\n       in any dtype\n\nA `f_g` too.\n\n>>> 1 + 1\n2"
    lines = text.splitlines()
    conf.as_rst(None, "", "", None, None, lines)
    made = "\n".join(lines)
    assert "What it is; a\\_ij \\* b.\n\n" in made
    assert ".. code-block:: text\n\n   q, k   the inputs,\n          in any dtype\n\n" in made
    assert "A ``f_g`` too.\n\n>>> 1 + 1\n2" in made


def test_every_command_has_its_place():
    (commands,) = (each for each in command_line("en")._actions if each.dest == "command")
    shown = re.findall(r"^## (\w+)\n\n```console\n\$ clearhead \1 --help$", (DOCS / "commands.md").read_text(), re.M)
    assert shown == list(commands.choices)


def test_every_rule_and_statistic_is_told():
    said = getdoc(ch.attention) or ""
    assert [name for name in RULES if not re.search(rf"^(?:\w+, )*{name}\b", said, re.MULTILINE)] == []
    table = (DOCS / "matrix.md").read_text(encoding="utf-8")
    assert [name for name in listed() if f"\n| `{name}` | " not in table] == []


def test_there_are_no_more_pages_than_one_can_keep_true():
    english = [path for path in DOCS.rglob("*.md") if "zh" not in path.relative_to(DOCS).parts]
    assert len(english) <= 24
    assert len([*(DOCS / "zh").rglob("*.md")]) <= 14


@pytest.mark.parametrize("home", [DOCS, DOCS / "zh"], ids=["en", "zh"])
def test_each_page_says_whom_it_is_for_and_leads_to_the_next(home):
    names = re.findall(r"^(?:lessons/)?[\w-]+$", (home / "index.md").read_text("utf-8"), re.MULTILINE)
    for name, following in pairwise([*names, ""]):
        text = (home / f"{name}.md").read_text("utf-8").strip()
        assert re.match(r"# .*\n\n(For |After this lesson|写给|学完这一课)", text), name
        left = following in ("", "reference", "commands")  # to look things up, not to read on
        assert left or f"{Path(following).name}.md" in text.split("\n\n")[-1], name


def test_the_version_is_the_same_everywhere():
    assert f"version: {ch.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {ch.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Both languages, built without a warning, in forks: they need not import PyTorch and Transformers again."""
    from sphinx.cmd.build import build_main

    out = tmp_path_factory.mktemp("site")
    building = [["-q", "-W", "--keep-going", *source, str(out / name)] for name, source in SOURCES.items()]
    with warnings.catch_warnings(action="ignore"), ProcessPoolExecutor(2, get_context("fork")) as pool:
        assert [*pool.map(build_main, building)] == [0, 0]
    return out


@pytest.mark.gate
def test_every_public_name_is_in_the_reference(site):
    head, _, packed = (site / "en/objects.inv").read_bytes().partition(b"zlib.\n")
    assert head.startswith(b"# Sphinx inventory version 2")
    known = {line.split(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}
    names = [*public.MODULES, *public.names()]
    names += [f"{kind.__module__}.{kind.__qualname__}" for kind in public.returned()]
    names += [f"clearhead.errors.{name}" for name in errors.__dict__ if name.endswith("Error")]
    names += [f"clearhead.AttentionMatrix.{name}" for name in (*listed(), "cut", "save") if name != "output"]
    assert len(names) > 90
    assert [name for name in names if name not in known] == []


@pytest.mark.gate
def test_links_between_the_languages_hold(site):
    for path in site.rglob("*.html"):
        for address in re.findall(r'href="((?:\.\./)+(?:en|zh)/[^"#]+)', path.read_text("utf-8")):
            assert (path.parent / address).exists(), (path, address)
    first = (site / "zh/index.html").read_text("utf-8")
    assert "搜索" in first  # Sphinx's own words
    assert "下一个词" in (site / "zh" / re.findall('<iframe src="(.*?)"', first)[0]).read_text("utf-8")
