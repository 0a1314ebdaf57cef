"""What objects show in a notebook: small tables with words and the terminal's rows; and how tokens are spelled."""

import json
import pickle
import re
import shutil
import subprocess
from functools import cache
from html import unescape
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from clearhead.spelling import spelled
from clearhead.watching.effects import EDGES, HEADS, Edge, Head, Lines
from page_files import HOSTILE
from seeds import fresh
from terminal import call

TEXT = "mary had a little lamb its fleece was white as"
ROOT = Path(ch.__file__).parent


@cache
def results():
    """Every object with tables, by name."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tokenizers import Tokenizer

    model = transformers.GPT2LMHeadModel.from_pretrained(ROOT / "models/rhymes").double()
    tokenizer = Tokenizer.from_file(str(ROOT / "models/rhymes/tokenizer.json"))
    ids = torch.tensor([tokenizer.encode("humpty dumpty sat on a").ids])
    with ch.watch(model, causes=True, tokenizer=tokenizer) as seen:
        model(ids).logits[0, -1, 5].backward()
    edges = seen.strongest(30)
    lists = {"edges": edges, "summary": seen.summary()}
    lists["verified"] = seen.verify(seen.strongest(4), lambda: model(ids).logits[0, -1, 5])
    return lists | {"why": ch.explain(TEXT), "explain": ch.explain(TEXT)}


def shown(result):
    bundle = getattr(result, "_repr_mimebundle_", None)
    return bundle()["text/html"] if bundle else result._repr_html_()


def rows_of(text):
    """The cells of each row, without bars."""
    rows = re.findall(r"<tr>(<td.*?)(?=<tr>|</table>)", text)
    cells = ([unescape(re.sub("<.*?>", "", cell)) for cell in re.split("<td[^>]*>", row)[1:]] for row in rows)
    return [[cell for cell in row if not set(cell) & set("█▏▎▍▌▋▊▉") and cell] for row in cells]


def test_every_result_is_a_small_table_in_both_languages(monkeypatch):
    for name, result in results().items():
        monkeypatch.setenv("LC_ALL", "en_GB.UTF-8")
        english = shown(result)
        monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
        chinese = shown(result)
        for text in (english, chinese):
            assert len(text.encode()) < 12_000, name
            assert text.count("<table>") >= 1 <= text.count("<b>"), name
            assert not re.search(r"<script|src=|href=|<iframe", text), name
        words = [re.findall("<(?:b|th scope=col[^>]*)>([^<]+)", text) for text in (english, chinese)]
        assert len(words[0]) == len(words[1]) > 1
        assert re.search("[\u4e00-\u9fff]", "".join(words[1])), name
        assert not re.search("[\u4e00-\u9fff]", "".join(words[0])), name
        if name != "explain":  # which says something in its cells
            assert rows_of(english) == rows_of(chinese), name


def test_lists_have_the_terminals_rows_and_stay_lists():
    for name in ("edges", "summary", "verified"):
        result = results()[name]
        printed = [line.replace(" ← ", "←").split() for line in str(result).splitlines()[1 : len(result) + 1]]
        cells = [[cell.replace(" ← ", "←") for cell in row] for row in rows_of(shown(result))]
        assert cells == printed[:20] != [], name
        again = pickle.loads(pickle.dumps(result))
        assert (again, str(again), shown(again)) == (result, str(result), shown(result))
        assert result == list(result) == json.loads(json.dumps(result), object_hook=dict) or result[0]._fields
        assert type(result[1:]) is list
    inks = re.findall("color:#(4a86e8|d9730d)", shown(results()["verified"]))  # blue is what the answer loses without
    assert inks == ["4a86e8" if edge.truth < 0 else "d9730d" for edge in results()["verified"]]
    assert len(set(re.findall("color:#(4a86e8|d9730d)", shown(results()["why"])))) == 2
    assert "and 10 more" in shown(results()["edges"])
    assert f"{results()['verified'].agreement:.2f}" in shown(results()["verified"])


def test_why_has_the_terminals_rows_and_its_conclusion():
    lines = [" ".join(line.split()) for line in call("explain", TEXT, "--why").stdout.splitlines()]
    text = shown(results()["why"])
    for row in rows_of(text)[:4] + rows_of(text)[-8:-5]:
        assert any(all(cell in line for cell in row) for line in lines), row
    said = [unescape(each) for each in re.findall("<p>([^<]+)</p>", text)]
    assert [each for each in said if each.startswith("So: ")] == [each for each in lines if each.startswith("So: ")]


def test_what_a_run_shows_stays_small():
    heads = (Head(str(layer), head, *np.ones(5)) for layer in range(80) for head in range(64))
    many = Lines(heads, "summary table", HEADS)
    assert len(shown(many)) < 12_000
    odd = Lines([Edge("0", 0, 0, 0, 0, x) for x in (np.nan, np.inf, 1.0)], "edges table", EDGES)
    assert [row[-1] for row in rows_of(shown(odd))] == ["NaN", "∞", "1"]
    assert shown(odd).count("██████████") == 2  # of ∞ and of 1
    for name in ("why", "explain"):
        assert ".show()" in shown(results()[name])
        whole = results()[name].show()
        assert (len(repr(whole)) < 30, shown(whole)[:7]) == (True, "<iframe")


def test_tokens_and_names_cannot_leave_their_cells():
    named = [(HOSTILE[0], "<script>x</script>"), ("", "")]
    edges = Lines([Edge("<img>", 0, 0, 1, 1, 1.0)] * 2, "edges table", EDGES, named)
    assert not re.search("<img|<script", shown(edges))
    assert "<bdi>&lt;script&gt;x&lt;/script&gt;</bdi>" in shown(edges)


def odd_texts():
    """Texts that could be taken for others."""
    parts = [" ", "  ", " " * 4, "8", "×8", "␣", "⏎", "∅", "\n", "\t", "\r", "\0", "\\", "\\t", "x07", "\x07", "u200b"]
    parts += ["a", "\u180b", "\u200b", "\u200d", "\ufe0f", "\u3164", "⇥", "␍", "U0001f600", "\U000e0101", "\ud800"]
    return sorted({"".join(x) for n in range(4) for x in fresh().choice(parts, (2000, n))})


def spelled_by_the_page(texts):
    """What numbers.js makes of texts."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    where = Path(__file__).parents[1] / "page/src/numbers.js"
    program = f"import {{ spelled }} from {where.as_uri()!r}; import fs from 'fs'; const texts = JSON.parse("
    program += "fs.readFileSync(0)); console.log(JSON.stringify(texts.map((each) => spelled(each, 9999))))"
    command, data = ["node", "--input-type=module", "-e", program], json.dumps(texts)
    return json.loads(subprocess.run(command, input=data, capture_output=True, text=True, check=True).stdout)


def test_no_two_texts_are_spelled_alike_and_the_page_agrees():
    model = ch.load_model()
    for texts in (odd_texts(), sorted({model.tokenizer.text(token) for token in range(model.config.vocabulary)})):
        names = [spelled(text) for text in texts]
        assert len(set(names)) == len(texts) > 2000
        assert all(name and name.isprintable() for name in names)
        assert spelled_by_the_page(texts) == names
