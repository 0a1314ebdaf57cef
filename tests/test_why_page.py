"""The page of `explain --why --html` in a real browser: signed shading, edges and heads that open their place below."""

import re

import numpy as np
import pytest

import clearhead as ch
from browser import number, opened, until
from clearhead.digits import percent
from clearhead.explaining import head_steps, why_page
from clearhead.explaining.answers import probability
from clearhead.explaining.why_page import OtherNumber, numbers_of
from clearhead.explaining.why_words import conclusion, ratio, so_likely
from clearhead.view.container import Document
from page_files import HOSTILE, header_of
from seeds import fresh
from terminal import call
from test_why import random_model, random_text, shipped

TEXT = "mary had a little"
SHADED = ".passage .token[style]"


@pytest.fixture(scope="module")
def seen():
    return ch.explain(TEXT, shipped(), answer="lamb", against="nut")


def document(seen, language="en"):
    return why_page.document(seen, language)


def rows_of(page, table):
    """Of each row of a table its heading, the texts that are no numbers, and the numbers."""
    for row in page.locator(f"{table} tbody tr").all():
        cells = row.locator("td").all_text_contents()
        edge = [cell for cell in cells if "←" in cell]
        yield [row.locator("th").text_content(), *edge, *(number(cell) for cell in cells if "←" not in cell)]


def near(result, expected):
    """Is it what was printed, with two decimals, or fewer of a larger number?"""
    return result == pytest.approx(expected, rel=0.01, abs=5.1e-3)


def so(one, change):
    """What the terminal says of the answer where its number changes by that: an explanation's, or a word's of it."""
    if isinstance(one, OtherNumber):
        single = " ".join(one.token.text.split()) == "lamb"
        return number(ratio(one.value + change) if single else percent(probability(one.value + change)))
    return number(so_likely(one, change))


# the document


def test_the_page_of_a_word_reads_what_was_said_before_it():
    found = ch.explain(TEXT, shipped(), answer=" lamb its fleece", word="fleece")
    runs = document(found).header["runs"]
    assert "".join(runs[0]["tokens"]) == found.text == f"{TEXT} lamb its"


def test_of_a_long_text_some_layers_have_weights(running, seen, monkeypatch):
    monkeypatch.setattr(head_steps, "ROOM", 1)  # for one layer
    first = seen.heads[0].layer
    with opened(running, seen.to_html(), wait=".map-of", place="#at=0.1.5") as page:  # which opens the map
        assert f"steps of layers {first} only, rounded to bfloat16" in page.locator(".fold").first.text_content()
        page.locator("details.fold > summary").last.click()
        page.locator(f".front [data-place='{1 - first} 5']").click()
        until(page, f"document.querySelector('#head').textContent === 'Layer {1 - first}, head 5'")
        assert "stored as an image" in page.locator(".here").text_content()
        assert page.locator("#pick-layer option").all_text_contents() == [str(first)]
        page.locator(f".front [data-place='{first} 5']").click()
        until(page, "document.querySelector('.here').textContent.includes('q, k (bfloat16)')")


def test_a_chats_turns_are_blocks_its_templates_tokens_folded(running, seen):
    made = document(seen)
    made.header["why"]["turns"] = [("system", 1, 2), ("user", 2, 3)]
    with opened(running, made, wait=".turn") as page:
        assert page.locator(".turn").all_text_contents() == ["system", "user"]
        visible = [token.is_visible() for token in page.locator(".passage .token").all()]
        assert visible == [False, True, True, True]  # the last one answers
        page.locator(".turn").first.click()
        assert page.locator(".passage .token").first.is_visible()


def test_the_command_writes_the_page_or_the_report(tmp_path):
    path, text = tmp_path / "why.html", tmp_path / "text.txt"
    text.write_text(f"{TEXT}\n", encoding="utf-8")
    arguments = "--why", "lamb", "--against", "nut", "--parts", "words", "--html"
    done = call("explain", TEXT, *arguments, path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Why ␣lamb (99.71%) rather than ␣nut")
    printed = call("explain", "--file", text, *arguments, "-")
    assert printed.stdout == path.read_text(encoding="utf-8")
    chinese = call("explain", "--file", text, *arguments, "-", "--lang", "zh")
    assert header_of(chinese.stdout)["language"] == "zh"
    refused = call("explain", TEXT, *arguments, tmp_path / "why.txt")
    assert refused.returncode == 2
    assert "the name of a page must end in .html" in refused.stderr


# the browser


def test_each_token_is_explained_by_a_click(running, seen):
    whole = ch.explain(TEXT, shipped(), answer=" lamb unbelievably")
    word, alone = numbers_of(whole)[1], ch.explain(f"{TEXT} lamb", shipped(), answer=" unbelievably")
    assert len(alone.again.based[0].target.answer) > 1
    assert word.token.probability == pytest.approx(alone.probability, rel=1e-4)
    hidden = [part.hidden for part in alone.parts[: len(whole.parts)]]
    np.testing.assert_allclose(word.by_part, hidden, rtol=1e-3, atol=1e-4)
    known = {edge[:4]: (edge.truth, edge.share) for edge in alone.edges}
    both = [((edge.truth, edge.share), known[edge[:4]]) for edge in word.edges if edge[:4] in known]
    assert len(both) > 3, word.edges
    np.testing.assert_allclose(*zip(*both, strict=True), rtol=1e-3, atol=1e-4)
    single = ch.explain(TEXT, shipped())
    rivals = numbers_of(single)
    for other in rivals[:2]:
        pair = ch.explain(TEXT, shipped(), against=other.against.text)
        np.testing.assert_allclose(other.by_head, pair.estimate.heads_run, rtol=1e-3, atol=1e-4)
    assert numbers_of(seen) == numbers_of(alone) == []  # two answers are compared; one word
    shown = (whole, 2, word, "Why “unbelievably”?"), (single, 1, rivals[0], "Why “lamb” and not “girl”?")
    for why, place, one, title in shown:
        with opened(running, why.to_html(), wait=SHADED) as page:
            before = page.locator("h1").text_content()
            assert " and not " not in before
            page.locator(".choices button").nth(place).click()
            assert re.sub("[\u2068\u2069]", "", page.locator("h1").text_content()) == title
            assert page.evaluate("document.activeElement.id") == f"number-{place}"
            effects = [effect for _, effect in squares(page)]
            assert all(map(near, effects, (so(one, x) for x in one.by_head.ravel())))
            strongest = {f"{edge.layer}.{edge.head}": edge for edge in reversed(one.edges)}
            for name, *row in rows_of(page, ".carried"):
                edge = strongest[name]
                assert all(map(near, row[1:3], (edge.weight, so(one, edge.truth)))), (name, row, edge)
            page.locator(".passage .token").first.hover()
            until(page, "document.querySelector('.front .caption').textContent.startsWith('mary → <|endoftext|>: ')")
            assert near(number(page.locator(".front .caption").text_content().split()[-1]), so(one, one.by_part[0]))
            page.locator(".choices button").first.click()
            assert page.locator("h1").text_content() == before


def test_an_answer_of_several_tokens_names_their_edges(running):
    seen = ch.explain(TEXT, shipped(), answer=" lamb its fleece", count=12)
    assert max(edge.query for edge in seen.edges) >= len(seen.tokens)
    names = ["mary", "␣had", "␣a", "␣little", "␣lamb", "␣its"]
    with opened(running, seen.to_html(), wait=SHADED) as page:
        page.locator(".fold > summary").first.click()
        for row, edge in zip(rows_of(page, ".fold section:nth-child(2)"), seen.edges, strict=True):
            assert row[1] == " ← ".join(names[place] for place in edge[2:4])
        for button in page.locator(".fold >> nth=0 >> section:nth-child(2) button").all():
            button.click()
        head = f"{seen.edges[-1].layer} {seen.edges[-1].head}"
        assert page.locator(".front [aria-pressed=true]").get_attribute("data-place") == head


def test_a_long_answer_and_an_unlikely_rival_fit(running):
    seen = ch.explain(TEXT, shipped(), against="🍕 who")
    with opened(running, seen.to_html(), wait=SHADED) as page:
        assert re.sub("[\u2068\u2069]", "", page.locator("h1").inner_text()) == "Why “lamb” and not “🍕 who”?"
        shown = page.locator(".carried td:last-child").all_text_contents()
        assert shown == [so_likely(seen, head.truth) for head in seen.heads]
    seen = ch.explain(TEXT, shipped(), answer=" lamb its fleece was white as snow" * 3)
    with opened(running, seen.to_html(), wait=SHADED) as page:
        assert page.locator(".passage").evaluate("box => box.scrollWidth - box.clientWidth") == 0


def test_text_edges_heads_and_weights_have_the_runs_numbers(running, seen):
    def ends(edge):
        return " ← ".join(seen.tokens[place].text.replace(" ", "␣") for place in edge[2:4])

    with opened(running, seen.to_html(), wait=SHADED) as page:
        title = page.locator("h1").inner_text()
        assert re.sub("[\u2068\u2069]", "", title) == "Why “lamb” and not “nut”?"
        assert f"a lead of {seen.rivals.lead:.2f}" in page.locator(".fold").first.text_content()
        assert page.locator(".passage .reply bdi").text_content() == "␣lamb"
        for token, effect in zip(page.locator(".passage .token").all(), seen.estimate.by_token, strict=True):
            red, _, blue = _ground(token)
            assert (blue > red) == (effect > 0) or abs(effect) < 1e-3 * np.abs(seen.estimate.by_token).max()
        for row, part in zip(rows_of(page, ".fold section:first-child"), seen.ranked, strict=True):
            assert row[0] == part.text + f" → {part.replaced}" * bool(part.replaced)
            assert all(map(near, row[1:], (so(seen, part.hidden), part.effect)))
        assert re.sub("[\u2068\u2069]", "", page.locator("p.so").text_content()) == " ".join(conclusion(seen, "en"))
        page.locator(".passage .token").first.hover()
        until(page, "document.querySelector('.front .caption').textContent.startsWith('mary → <|endoftext|>: × nut ')")
        assert so_likely(seen, seen.parts[0].hidden) in page.locator(".front .caption").text_content()
        for row, edge in zip(rows_of(page, ".fold section:nth-child(2)"), seen.edges, strict=True):
            assert row[:2] == [f"{edge.layer}.{edge.head}", ends(edge)]
            assert row[2] == pytest.approx(edge.weight, abs=6e-4)
            assert near(row[3], so(seen, edge.truth))
        for row, head in zip(rows_of(page, ".carried"), seen.heads, strict=True):
            assert row[:2] == [f"{head.layer}.{head.head}", ends(head.edge)]
            assert row[2] == pytest.approx(head.edge.weight, abs=6e-4)
            assert all(map(near, row[3:], (so(seen, head.edge.truth), so(seen, head.truth))))


def squares(page):
    """Of each head in the grid its name, and how likely the answer is without it."""
    labels = page.locator(".heads .head").evaluate_all("all => all.map((each) => each.ariaLabel)")
    said = (re.match(r"Layer (\d+), head (\d+) \((\S+)\)", label).groups() for label in labels)
    return [(f"{layer}.{head}", number(effect)) for layer, head, effect in said]


def test_every_head_is_in_one_grid(running, seen):
    with opened(running, seen.to_html(), wait=SHADED) as page:
        changes = {f"{layer}.{head}": x for (layer, head), x in np.ndenumerate(seen.estimate.heads_run)}
        assert [name for name, _ in squares(page)] == list(changes)
        assert all(near(effect, so(seen, changes[name])) for name, effect in squares(page))
        page.locator(".front [data-place='1 6']").click()
        assert page.locator(".front [aria-pressed=true]").get_attribute("data-place") == "1 6"
        assert "of head 1.6" in page.locator(".fold > summary").nth(1).text_content()
        page.locator(".front [data-place='1 6']").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowUp")
        assert page.evaluate("document.activeElement.dataset.place") == "0 5"
        until(page, "[...document.querySelectorAll('.heads canvas')].every((each) => each.dataset.missing === '0')")
        assert page.locator(".heads canvas").count() == 2


def test_a_head_that_is_pointed_at_draws_its_edges(running, seen):
    with opened(running, seen.to_html(), wait=SHADED) as page:
        run = shipped().run([token.id for token in seen.tokens])
        for place in ("0 4", "1 5"):
            layer, head = map(int, place.split())
            ran = run.layers[layer]
            row = np.asarray(ch.AttentionMatrix(ran.q, ran.k, **ran.rules)[head, -1])
            page.locator(f".front [data-place='{place}']").hover()
            widths = page.locator(".edges path:not(.wide)").evaluate_all(
                "all => all.map((x) => +x.getAttribute('stroke-width'))"
            )
            assert widths == pytest.approx([1 + 4 * x for x in sorted(row, reverse=True) if x > 0.005], abs=0.051)
            caption = page.locator(".front .caption").text_content()
            strongest = seen.tokens[int(row.argmax())].text.strip()
            assert f"at “little”: {strongest} {100 * row.max():.0f}%" in caption
            assert caption.count("over the text: ") == 1


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_question_text_and_model_share_the_first_screen(running, width, height):
    made = document(ch.explain(TEXT, shipped()))
    with opened(running, made, width, height, wait=SHADED) as page:
        boxes = page.evaluate(
            "() => ['h1', '.choices', '.passage', '.next', innerWidth < 400 ? '#overview' : '.picture']"
            ".map((name) => document.querySelector(name).getBoundingClientRect().toJSON())"
        )
        assert all(0 <= box["top"] < box["bottom"] <= height and box["right"] <= width for box in boxes)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.locator(".carried .pan").evaluate("pan => pan.scrollWidth <= pan.clientWidth")
        assert page.locator(".carried").bounding_box()["y"] < height or width < 400


def test_a_long_text_opens_at_its_strongest_part(running):
    rng = fresh()
    first = int(rng.choice([1, 40, 700]))
    seen = ch.explain("mary " * 1250, random_model(rng, 1300), parts=[(5 * first, 5 * first + 15)])
    with opened(running, seen.to_html(), wait=SHADED) as page:
        boxes = f"['[data-token=\"{first}\"]', '.passage'].map(x => document.querySelector(x).getBoundingClientRect())"
        until(page, f"(([token, box]) => box.top <= token.top && token.bottom <= box.bottom)({boxes})")


def _ground(element):
    result = element.evaluate("element => getComputedStyle(element).backgroundColor")
    return [float(x) for x in re.findall(r"[\d.]+", result)[:3]]


@pytest.mark.smoke
def test_an_edge_chooses_its_place_by_mouse_and_keyboard(running):
    rng = fresh()
    model = random_model(rng)
    answer = int(rng.integers(model.config.vocabulary))
    seen = ch.explain(random_text(rng, 4), model, answer=answer, count=4)
    run = model.run([token.id for token in seen.tokens])
    with opened(running, seen.to_html(), reduced_motion="reduce", wait=SHADED) as page:
        for fold in page.locator("details.fold > summary").all():
            fold.click()
        for place, edge in enumerate(seen.edges):
            button = page.locator(".fold section:nth-child(2) button").nth(place)
            button.press("Enter") if place % 2 else button.click()
            _at(page, edge)
            layer = run.layers[edge.layer]
            weight = ch.AttentionMatrix(layer.q, layer.k, **layer.rules)[edge.head, edge.query, edge.key]
            until(page, f"document.querySelector('#readout').textContent.startsWith('query {edge.query} ')")
            said = page.locator("#readout").text_content()
            assert number(said.split(": ")[-1].split(" ")[0]) == pytest.approx(float(weight), abs=1e-4)
        head = seen.heads[-1]
        page.locator(".carried button").last.press("Enter")
        chosen = "document.querySelector('.front [aria-pressed=true]').dataset.place"
        until(page, f"{chosen} === '{head.layer} {head.head}'")
        assert [_picked(page, name, 0) for name in ("layer", "head")] == [head.layer, head.head]


def _at(page, edge):
    until(page, f"document.querySelector('.front [aria-pressed=true]').dataset.place === '{edge.layer} {edge.head}'")
    for _ in range(50):  # the steps follow when the pointer rests
        picked = [_picked(page, name, 0) for name in ("layer", "head", "query")]
        if picked == list(edge[:3]):
            break
        page.wait_for_timeout(100)
    assert picked == list(edge[:3])


def _picked(page, name, otherwise):
    """What the bar says; where there is one layer or head only, it says nothing."""
    pick = page.locator(f"#pick-{name}")
    return int(pick.input_value()) if pick.count() else otherwise


def test_hostile_tokens_are_text(running, seen):
    made = document(seen)
    why = made.header["why"]
    why |= {name: {**why[name], "text": HOSTILE[1]} for name in ("token", "against")}
    header = {**made.header, "why": why, "tokens": [*HOSTILE[2:]][: len(seen.tokens)], "title": HOSTILE[0]}
    with opened(running, Document(header, made.arrays), 390, wait=SHADED) as page:
        assert page.evaluate("window.bad") is None
        assert page.locator("main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_every_kind_of_colour_vision_tells_the_colours_apart(running, seen):
    """The two of the legend, as seen without one kind of cones (Viénot, Brettel and Mollon 1999)."""
    protan = [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]]
    deutan = [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]
    with opened(running, seen.to_html(), wait=SHADED) as page:
        grounds = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            until(page, f"matchMedia('(prefers-color-scheme: {scheme})').matches")
            page.wait_for_timeout(200)  # the page draws itself again
            grounds.append(
                [np.array(_ground(page.locator(f".front [data-place='0 {head}'] small"))) for head in (2, 5)]
            )
    for blue, orange in grounds:
        scale = 1 if max(*blue, *orange) <= 1 else 255
        linear = [(colour / scale) ** 2.2 for colour in (blue, orange)]
        for kind in (np.eye(3), np.array(protan), np.array(deutan)):
            first, second = (np.clip(kind @ colour, 0, 1) ** (1 / 2.2) * 255 for colour in linear)
            assert np.abs(first - second).max() > 40, (first, second)
