"""The reference in Chinese: every piece of English has its translation, which has the same code, numbers and errors.

So do the entries of the changelog.
"""

import re
import sys
from pathlib import Path

import pytest

from test_chinese_pages import as_english
from test_chinese_words import ONE_NAME, SPACING, WITHIN

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from frame import chinese, errors, reference, tables  # noqa: E402

KEPT = {
    "code": r"`[^`]+`",
    "numbers": r"\d+(?:[.,]\d+)*",
    "errors": r"[A-Z]\w*(?:Error|Warning)",
    "names with an underscore": r"[A-Za-z]\w*_\w+",
}
PAGE = """# What calls return

:::::{py:class} Thing(q, k)
:module: clearhead

What it is, and
more of it.

`q`, `k`
: the inputs, a_ij \\* 2

```pycon
>>> What it is
```

```text
f=True  one thing   (heads,)
g=8     another     (keys,)
```
:::::

| name | what |
| --- | --- |
| [`Thing`](thing.md) | \\|x\\| of it |

- [Thing](thing.md): a list
"""


@pytest.mark.parametrize("kind", KEPT)
def test_a_translation_keeps_what_is_no_prose(kind):
    for english, translated in chinese.catalogue().items():
        both = [re.sub(r"[\u3000-\u9fff\uff00-\uffef]", " ", as_english(text)) for text in (english, translated)]
        wanted, kept = (sorted(set(re.findall(KEPT[kind], text))) for text in both)
        assert kept == wanted, f"{english}\n{translated}"


def test_translations_are_worded_and_set_as_the_pages_are():
    for text in chinese.catalogue().values():
        plain = WITHIN.sub(lambda match: "`x`" if match[0][0] == "`" else "]", text)
        assert not SPACING.search(plain), text
        assert not any(wrong in text for wrong in ONE_NAME), text


def test_pieces_of_a_page_are_translated_and_its_code_is_not():
    said = []

    def say(piece, *, needed=True):
        said.append((piece, needed))
        return f"【{piece}】" if needed else {"one thing": "一件"}.get(piece, piece)

    made = chinese.page(PAGE, say)
    assert "\n【What it is, and more of it.】\n" in made
    assert ": 【the inputs, a\\_ij \\* 2】" in made
    assert "| [`Thing`](thing.md) | 【\\|x\\| of it】 |" in made
    assert "- [Thing](thing.md)：【a list】" in made
    assert "f=True  一件         (heads,)\ng=8     another     (keys,)\n" in made
    assert ("the inputs, a_ij * 2", True) in said
    assert ("What calls return", False) in said
    for kept in (":::::{py:class} Thing(q, k)\n:module: clearhead\n", "`q`, `k`\n", "```pycon\n>>> What it is\n```"):
        assert kept in made
    assert not any(piece.startswith((":", ">")) or "`" in piece for piece, _ in said)


def test_english_without_chinese_and_chinese_without_english_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(chinese, "CATALOGUES", tmp_path)
    path = tmp_path / "some.po"
    path.write_text('msgid "One."\nmsgstr "一。"\n\nmsgid "Two."\nmsgstr "二。"\n', "utf-8")
    assert chinese.pages({"a": "One.\n\nTwo."}) == {"a": "一。\n\n二。"}
    with pytest.raises(ValueError, match=r"no Chinese for 'Two, changed.'\n.*no page says any more 'Two.'"):
        chinese.pages({"a": "One.\n\nTwo, changed."})
    path.write_text('msgid "One."\nmsgstr ""\n', "utf-8")
    with pytest.raises(ValueError, match="twice, or not at all"):
        chinese.catalogue()


def test_every_docstring_of_the_reference_has_its_chinese():
    for name in ("torch", "transformers"):
        pytest.importorskip(name)
    english = reference.pages(reference.names()) | tables.pages() | errors.pages()
    made = chinese.pages(english)
    assert made.keys() == english.keys()
    for name in ("reference/clearhead/attention", "reference/statistics", "reference/errors", "reference/returned"):
        assert re.search(r"[\u4e00-\u9fff]", made[name]), name
    for name, text in english.items():  # examples are not written a second time
        assert re.findall(r"^```p.*?^```$", made[name], re.DOTALL | re.MULTILINE) == re.findall(
            r"^```p.*?^```$", text, re.DOTALL | re.MULTILINE
        )


def entries(path: Path) -> list[tuple[int, str]]:
    """The entries of a changelog: in which section, and their text on one line."""
    results, section = [], 0
    for block in re.split(r"\n(?=- |#|\n)", path.read_text("utf-8")):
        section += block.lstrip().startswith("#")
        if block.startswith("- "):
            results.append((section, " ".join(block.split())))
    return results


def test_the_changelogs_in_both_languages_have_the_same_entries():
    english, translated = entries(ROOT / "CHANGELOG.md"), entries(ROOT / "docs/zh/changelog.md")
    assert len(english) > 40
    for (section, text), (other, chinese_text) in zip(english, translated, strict=True):
        said = f"{text}\n{chinese_text}"
        assert section == other, said
        for kind in ("code", "errors"):
            wanted, kept = (sorted(set(re.findall(KEPT[kind], each))) for each in (text, chinese_text))
            assert kept == wanted, said
