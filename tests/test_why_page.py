"""The page of `explain --why --html` in a real browser: signed shading, edges and heads that open their place below."""

import json
import re

import numpy as np
import pytest

import clearhead as ch
from browser import number, opened, until
from clearhead.explaining import why_page
from clearhead.view.container import Document
from seeds import fresh
from terminal import call
from test_page import HOSTILE, scripts
from test_why import random_model, random_text, shipped

TEXT = "mary had a little"


@pytest.fixture(scope="module")
def seen():
    return ch.why(TEXT, shipped(), token="lamb", against="nut")


def document(seen, language="en"):
    return why_page.document(seen, language)


def rows_of(page, table):
    rows = page.locator("#step-why table").nth(table).locator("tbody tr").all()
    cells = [[text.removesuffix("%") for text in row.locator("td").all_text_contents()] for row in rows]
    return [[row.locator("th").text_content(), *map(number, cell)] for row, cell in zip(rows, cells, strict=True)]


def near(result, expected):
    """Is it what was printed, with two decimals, or fewer of a larger number?"""
    return result == pytest.approx(expected, rel=0.01, abs=5.1e-3)


# the document


def test_the_header_has_the_numbers_of_the_json_and_every_layer_that_it_names():
    rng = fresh()
    seen = ch.why(random_text(rng, 3), random_model(rng), count=int(rng.integers(1, 9)))
    made, data = document(seen).header, seen.to_json()
    data["parts"].sort(key=lambda part: -abs(part["effect"]))
    assert {name: made["why"][name] for name in made["why"] if name != "words"} == {
        name: data[name] for name in made["why"] if name != "words"
    }
    named = {effect["layer"] for name in ("edges", "heads") for effect in made["why"][name]}
    assert named <= {layer["number"] for layer in made["layers"]}
    if seen.edges:
        assert tuple(made["chosen"].values()) == seen.edges[0][:3]


@pytest.mark.parametrize(("token", "against"), [("lamb", "nut"), ("nut", "lamb")])
def test_each_sentence_is_there_in_both_languages(token, against):
    words = document(ch.why(TEXT, shipped(), token=token, against=against)).header["why"]["words"]
    assert words["en"].keys() == words["zh"].keys()
    for name, english in words["en"].items():
        chinese = words["zh"][name]
        names = [set(re.findall(r"{\w*}", text)) for text in (english, chinese)]
        assert names[0] == names[1] <= {"{token}", "{against}", "{first}"}
        assert bool(re.search("[一-鿿]", chinese)) == bool(english), name
        assert "注意" not in chinese
    ahead, behind = ("{token}", "{against}") if token == "lamb" else ("{against}", "{token}")
    assert words["en"]["title"] == f"Why {ahead} and not {behind}"
    assert ("behind" in words["en"]["lead"]) == (token == "nut")


def test_one_token_the_same_text_twice_and_a_page_without_causes():
    seen = ch.why("mary had a", shipped())
    assert "why" not in json.loads(scripts(ch.explain("mary had").to_html())["clearhead"])
    assert seen.to_html() == seen.to_html()
    assert json.loads(scripts(seen.to_html("zh"))["clearhead"])["why"]["by_token"] == seen.by_token.tolist()


def test_the_command_writes_the_page_beside_or_in_place_of_the_report(tmp_path):
    path, text = tmp_path / "why.html", tmp_path / "text.txt"
    text.write_text(f"{TEXT}\n", encoding="utf-8")
    arguments = "--why", "lamb", "--against", "nut", "--parts", "words", "--html"
    done = call("explain", TEXT, *arguments, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Why ␣lamb (99.70%) rather than ␣nut")
    printed = call("explain", "--file", text, *arguments, "-")
    assert printed.stdout == path.read_text(encoding="utf-8")
    edited = call("explain", "--file", text, *arguments, "-", "--cut", "little>mary@0.3", "--lang", "zh")
    header = json.loads(scripts(edited.stdout)["clearhead"])
    assert (header["language"], len(header["edited"]["edits"])) == ("zh", 1)
    assert not any(edge["layer"] == 0 and edge["head"] == 3 and edge["key"] == 0 for edge in header["why"]["edges"])
    refused = call("explain", TEXT, *arguments, tmp_path / "why.txt")
    assert refused.returncode == 2
    assert "no name for a page" in refused.stderr


# the browser


def test_text_edges_heads_and_weights_have_the_numbers_of_the_run(running, seen):
    with opened(running, seen.to_html()) as page:
        section = page.locator("#step-why")
        title = section.locator("h2").inner_text()
        assert re.sub("[\u2068\u2069]", "", title) == "Why ␣lamb and not ␣nut"
        assert f"a lead of {seen.lead:.2f}" in section.locator(".says").text_content()
        assert page.locator(".answer #step-why").count() == 1
        tokens = section.locator("ol.tokens li").all()
        for index, (token, effect) in enumerate(zip(tokens, seen.by_token, strict=True)):
            assert token.locator("bdi").text_content() == f"{index} {seen.tokens[index].text.replace(' ', '␣')}"
            assert near(number(token.locator(".figures").text_content()), effect)
            red, _, blue = _ground(token)
            assert (blue > red) == (effect > 0) or not effect
        strongest = sorted(seen.parts, key=lambda part: -abs(part.effect))
        for row, part in zip(rows_of(page, 0), strongest, strict=True):
            assert row[0] == part.text
            assert near(row[1], part.effect)
            assert near(row[2], part.hidden)
            assert near(row[3], 100 * part.share)
        for row, edge in zip(rows_of(page, 1), seen.edges, strict=True):
            query, key = (f"{index} {seen.tokens[index].text.replace(' ', '␣')}" for index in edge[2:4])
            assert row[0] == f"{edge.layer}.{edge.head} {query} ← {key}"
            assert near(row[1], edge.effect)
            assert near(row[2], edge.truth)
            assert row[3] == pytest.approx(edge.weight, abs=6e-4)
        for row, head in zip(rows_of(page, 2), seen.heads, strict=True):
            assert row[0] == f"{head.layer}.{head.head}"
            assert near(row[1], head.effect)
            assert near(row[2], head.truth)


def _ground(element):
    result = element.evaluate("element => getComputedStyle(element).backgroundColor")
    return [float(x) for x in re.findall(r"[\d.]+", result)[:3]]


@pytest.mark.smoke
def test_an_edge_opens_its_layer_head_query_and_key_by_mouse_and_keyboard(running):
    rng = fresh()
    model = random_model(rng)
    seen = ch.why(random_text(rng, 4), model, count=4)
    run = model.run([token.id for token in seen.tokens])
    with opened(running, seen.to_html(), reduced_motion="reduce") as page:
        for place, edge in enumerate(seen.edges):
            button = page.locator("#step-why table").nth(1).locator("button").nth(place)
            if place % 2:
                button.focus()
                page.keyboard.press("Enter")
            else:
                button.click()
            _at(page, edge)
            layer = run.layers[edge.layer]
            weight = ch.AttentionMatrix(layer.q, layer.k, **layer.rules)[edge.head, edge.query, edge.key]
            written = page.locator("#step-weights .written").text_content()
            assert written.startswith(f"a{edge.query},{edge.key} =")
            assert number(written.split("= ")[-1].split("rank")[0]) == pytest.approx(float(weight), abs=1e-4)
            assert button.get_attribute("aria-pressed") == "true"
        head = seen.heads[-1]
        page.locator("#step-why table").nth(2).locator("button").last.press("Enter")
        assert _picked(page, "layer", 0) == head.layer
        assert _picked(page, "head", 0) == head.head
        page.keyboard.press("[")
        assert page.locator("#step-why table").nth(2).locator("[aria-pressed=true]").count() <= 1
        page.locator(".map [data-step=why]").click()
        assert page.evaluate("document.activeElement.id") == "step-why-title"


def _at(page, edge):
    until(page, "document.activeElement.id === 'step-weights-title'")
    assert [_picked(page, name, 0) for name in ("layer", "head", "query")] == list(edge[:3])


def _picked(page, name, otherwise):
    """What the bar says; where there is one layer or head only, it says nothing."""
    pick = page.locator(f"#pick-{name}")
    return int(pick.input_value()) if pick.count() else otherwise


def test_an_edge_leads_back_to_the_run_from_a_supposition_and_from_the_other_run(running):
    edits = ch.cut(queries="little", keys="mary", layers=[0], heads=[3])
    seen = ch.why(TEXT, shipped(), edits=edits)
    with opened(running, seen.to_html(), reduced_motion="reduce") as page:
        page.locator("#pick-edited").click()
        page.locator("#if-scale").click()
        assert page.locator(".ribbon").count() == 1
        page.locator("#step-why button").first.click()
        _at(page, seen.edges[0])
        assert page.locator("#pick-edited").is_checked()
        assert page.locator(".ribbon").count() == 0


def test_a_page_in_chinese_changes_to_english(running, seen):
    with opened(running, seen.to_html("zh")) as page:
        assert "查询 ← 键" in page.locator("#step-why").inner_text()
        page.locator("#language").click()
        assert "query ← key" in page.locator("#step-why").inner_text()


def test_hostile_tokens_are_text(running, seen):
    made = document(seen)
    why = made.header["why"]
    why |= {name: {**why[name], "text": HOSTILE[1]} for name in ("token", "against")}
    header = {**made.header, "why": why, "tokens": [*HOSTILE[2:]][: len(seen.tokens)], "title": HOSTILE[0]}
    with opened(running, Document(header, made.arrays), 390) as page:
        assert page.evaluate("window.bad") is None
        assert page.locator("main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_colours_are_told_apart_by_every_kind_of_colour_vision(running, seen):
    """The two of the legend, as seen without one kind of cones (Viénot, Brettel and Mollon 1999)."""
    protan = [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]
    deutan = [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]
    with opened(running, seen.to_html()) as page:
        grounds = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            until(page, f"matchMedia('(prefers-color-scheme: {scheme})').matches")
            page.wait_for_timeout(200)  # the page draws itself again
            result = page.evaluate(
                "[...document.querySelectorAll('#step-why p span')].map(x => getComputedStyle(x).backgroundColor)"
            )
            grounds.append([np.array([float(x) for x in re.findall(r"[\d.]+", each)[:3]]) for each in result])
    for blue, orange in grounds:
        scale = 1 if max(*blue, *orange) <= 1 else 255
        linear = [(colour / scale) ** 2.2 for colour in (blue, orange)]
        for kind in (np.eye(3), np.array(protan), np.array(deutan)):
            first, second = (np.clip(kind @ colour, 0, 1) ** (1 / 2.2) * 255 for colour in linear)
            assert np.abs(first - second).max() > 40, (first, second)
