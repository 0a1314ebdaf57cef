"""The page in a real browser, and the file it comes in."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from browser import browser, opened, until
from clearhead import explain as explaining
from clearhead import model
from clearhead.arrays import bfloat16
from clearhead.errors import FileError
from clearhead.story import Scene
from clearhead.view import page as writing
from clearhead.view.container import DIGITS, Document, parts

TEXT = "humpty dumpty sat on"
HOSTILE = (
    "<script>window.bad=1</script>",
    "</script><img src=x onerror=window.bad=1>",
    "\"'`&lt;<!--",
    "\u202eright to left \u05e9\u05dc\u05d5\u05dd",
    "👩\u200d🚀🙂",
    "\x00\x07\x1b[31m\ud800",
    "x" * 10000,
)
Q, K, V = (np.array(x) for x in ([[1, 3], [2, 0.5]], [[0.5, 2], [1, 3]], [[0.0, 4], [1, 2]]))


@pytest.fixture(scope="module")
def running():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def seen():
    return explaining.explain(model.load(), TEXT)


@pytest.fixture(scope="module")
def explained(seen, tmp_path_factory):
    place = tmp_path_factory.mktemp("page") / "explained.html"
    seen.save(place)
    return place


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    place = tmp_path_factory.mktemp("page") / "traced.html"
    ch.trace(Q, K, V).save(place)
    return place


def bytes_of(text):
    """Five digits, the lowest first, are four bytes, the lowest first."""
    words = (
        sum(DIGITS.index(c) * 85**place for place, c in enumerate(text[at : at + 5])) for at in range(0, len(text), 5)
    )
    return b"".join(word.to_bytes(4, "little") for word in words)


class _Scripts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.inside = {}, None

    def handle_starttag(self, tag, attrs):
        self.inside = dict(attrs).get("id", "program") if tag == "script" else None

    def handle_data(self, data):
        if self.inside:
            self.found[self.inside] = self.found.get(self.inside, "") + data


def scripts(text):
    reader = _Scripts()
    reader.feed(text)
    return reader.found


# the file


def test_the_same_trace_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        ch.trace(Q, K, V).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_file_is_whole_or_not_there(tmp_path):
    with pytest.raises(FileError, match="cannot be written"):
        ch.trace(Q, K, V).save(tmp_path / "missing" / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_nothing_in_the_file_names_another_place():
    text = ch.trace(Q, K, V).to_html()
    places = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"'`)]*", re.sub(r'octet-stream" id="[^<]*', "", text)))
    assert places <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}


def test_arrays_come_back_as_they_were_also_over_several_blocks():
    rng = np.random.default_rng(0)
    given = {
        "a": rng.standard_normal((3, 5)),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": np.array([True, False]),
        "d": np.arange(4)[::-1],
        "e": rng.standard_normal((2, 3)).astype(bfloat16).T,
    }
    found = {name: text for name, _, text in parts(Document({"kind": "none"}, given), block=64)}
    header = json.loads(found.pop("clearhead"))
    data = b"".join(bytes_of(text) for text in found.values())
    assert len(found) == -(-len(data) // 64) > 1
    for name, array in given.items():
        entry = header["arrays"][name]
        assert entry["at"] % 8 == 0
        stored = np.frombuffer(data, entry["dtype"], int(np.prod(entry["shape"])), entry["at"]).reshape(entry["shape"])
        assert np.array_equal(stored, array), name


def test_hostile_tokens_end_no_element():
    text = _page_with(HOSTILE)
    found = scripts(text)
    assert json.loads(found["clearhead"])["tokens"] == list(HOSTILE)
    assert set(found) <= {"clearhead", "clearhead-0", "program"}
    assert b"\x00" not in text.encode("utf-8", "xmlcharrefreplace")


def test_the_page_stays_small():
    folder = Path(writing.__file__).parent
    for program in folder.glob("*.js"):
        assert program.stat().st_size + program.with_suffix(".css").stat().st_size <= 60_000, program.name


def _page_with(tokens):
    size = len(tokens)
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, size, 4))
    return writing.html(ch.trace(q, k, v, causal=True).document(Scene(title=tokens[0], tokens=tokens)))


# the browser


def test_it_opens_from_disk_without_a_network_a_request_or_an_error(running, explained, traced):
    for path in (explained, traced):
        with opened(running, path) as (page, unwanted):
            _all_of(page)
            assert page.locator(".step").count() >= 7
            assert page.locator(".figure").count() >= 6
            assert unwanted == []


def test_pointing_at_a_cell_shows_its_number(running, traced):
    with opened(running, traced) as (page, _):
        figure = page.locator("#step-scores .figure")
        figure.scroll_into_view_if_needed()
        numbers = figure.locator("text.number").all_text_contents()
        assert numbers[-4:] == ["6.50", "10.0", "2.00", "3.50"]
        figure.locator("text.number", has_text="10.0").hover(force=True)
        written = page.locator("#step-scores .written")
        assert "s0,1 = q0·k1 = 1·1 + 3·3 = 10" in written.text_content()
        until(page, "document.querySelector('.live').textContent.includes(': 10')")
        page.mouse.move(1, 1)
        assert "s1,1" in written.text_content()


def test_the_weights_of_the_page_are_those_of_the_matrix(running, seen, explained):
    with opened(running, explained) as (page, _):
        _all_of(page)
        table = page.locator("#step-weights details.numbers")
        table.locator("summary").click()
        cells = table.locator("tbody tr").all()
        matrix = ch.AttentionMatrix(seen.run.q, seen.run.k, causal=True)[seen.head]
        for i, row in enumerate(cells):
            for j, text in enumerate(row.locator("td").all_text_contents()):
                assert (text == "masked") if j > i else abs(float(text) - matrix[i, j]) < 1e-4


def test_the_keyboard_walks_pins_and_chooses(running, explained, seen):
    with opened(running, explained) as (page, unwanted):
        _all_of(page)
        page.locator("#step-weights .figure").focus()
        for key in ("ArrowUp", "ArrowLeft"):
            page.keyboard.press(key)
        assert page.locator("#step-weights .written").text_content().startswith("a2,2 =")
        page.keyboard.press("Enter")
        assert page.locator("#pick-query").input_value() == "2"
        assert page.locator("#step-scores .written").text_content().startswith("s2,2 =")
        assert page.evaluate("document.activeElement.closest('.step').id") == "step-weights"
        page.keyboard.press("]")
        assert page.locator("#pick-head").input_value() == str((seen.head + 1) % 8)
        page.keyboard.press("{")
        assert page.locator("#pick-layer").input_value() == str((seen.layer - 1) % 2)
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "pick-query"
        assert unwanted == []


def test_a_layer_whose_projections_are_left_out_shows_what_the_run_said(running, explained, seen):
    other = (seen.layer + 1) % 2
    with opened(running, explained) as (page, unwanted):
        page.locator("#pick-layer").select_option(str(other))
        _all_of(page)
        page.locator("#step-output details.numbers summary").click()
        page.locator("#step-output tbody td").first.wait_for()
        shown = page.locator("#step-output tbody tr").first.locator("td").all_text_contents()
        assert [float(x.replace("−", "-")) for x in shown] == pytest.approx(seen.runs[other].output[0, :12], abs=1e-4)
        assert "not in this file" in page.locator("#step-output").text_content()
        assert unwanted == []


def test_theme_paper_and_axes(running, traced):
    with opened(running, traced, color_scheme="dark") as (page, unwanted):
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = page.evaluate(ground)
        page.locator("#theme").click()
        assert page.evaluate(ground) != dark
        page.locator("#theme").click()
        assert page.evaluate(ground) == dark
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert page.evaluate(ground) != dark
        assert page.locator(".hold:empty").count() == 0  # paper shows all steps
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.evaluate(ground) == dark
        page.locator(".axes [data-dim=d_k]").hover()
        assert page.locator("tspan.lit").count() >= 4
        assert page.locator("math .lit").count() >= 1
        assert unwanted == []


def test_what_if_recomputes_says_so_and_leads_back(running, traced):
    with opened(running, traced) as (page, _):
        _all_of(page)
        before = page.locator("#step-weights").text_content()
        assert page.locator(".ribbon").count() == 0
        page.check("#if-scale")
        e = np.exp([2 - 3.5, 0])
        assert f"{(e / e.sum())[1]:.4f}" in page.locator("#step-one").text_content()
        page.check("#if-causal")
        page.locator("#step-weights .figure").scroll_into_view_if_needed()
        assert "no scaling, causal mask" in page.locator(".ribbon").text_content()
        page.locator(".ribbon button").click()
        _all_of(page)
        assert page.locator(".ribbon").count() == 0
        assert page.locator("#step-weights").text_content() == before


def test_hostile_tokens_are_text(running, tmp_path):
    place = tmp_path / "hostile.html"
    place.write_bytes(_page_with(HOSTILE).encode("utf-8", "xmlcharrefreplace"))
    with opened(running, place) as (page, unwanted):
        _all_of(page)
        page.locator("#step-one button").first.click()
        assert page.evaluate("window.bad") is None
        assert page.locator("main img").count() == 0
        assert "<script>windo…" in page.locator("#pick-query").text_content()
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
        assert unwanted == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing_and_nothing_is_cut_off(running, explained, scheme, width):
    axe = Path(__file__).parents[1] / "page/node_modules/axe-core/axe.min.js"
    if not axe.exists():
        pytest.skip("axe-core is not installed: npm ci in page/")
    with opened(running, explained, width, color_scheme=scheme, bypass_csp=True, reduced_motion="reduce") as (page, _):
        _all_of(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.evaluate(axe.read_text(encoding="utf-8"))
        found = page.evaluate("axe.run().then(r => r.violations.map(v => v.id + ': ' + v.nodes[0].html.slice(0, 200)))")
        assert found == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_language_is_whole(running, tmp_path, language):
    place = tmp_path / "page.html"
    ch.trace_layer(*np.random.default_rng(2).standard_normal((5, 4, 4)), num_heads=2).save(place, language)
    with opened(running, place) as (page, _):
        _all_of(page)
        words = page.locator("main").inner_text()
        assert ("查询" in words) == (language == "zh")
        assert ("query" in words.lower()) == (language == "en")
        page.locator("#language").click()
        assert ("查询" in page.locator("main").inner_text()) == (language == "en")


ODD = {
    "no keys": ((2, 3), (0, 3), (0, 2)),
    "no queries": ((0, 3), (2, 3), (2, 2)),
    "no d_k": ((2, 0), (3, 0), (3, 2)),
    "one number": ((1, 1), (1, 1), (1, 1)),
    "many queries": ((300, 2), (3, 2), (3, 1)),
}


@pytest.mark.parametrize("odd", [*ODD, "NaN", "infinite", "nothing seen"])
def test_odd_shapes_and_numbers_draw_without_an_error(running, tmp_path, odd):
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal(shape) for shape in ODD.get(odd, ((3, 2),) * 3))
    if odd in ("NaN", "infinite"):
        q[1, 0] = {"NaN": np.nan, "infinite": np.inf}[odd]
    rules = {"mask": np.zeros((3, 3), bool)} if odd == "nothing seen" else {}
    ch.trace(q, k, v, **rules).save(tmp_path / "page.html")
    with opened(running, tmp_path / "page.html") as (page, unwanted):
        _all_of(page)
        assert unwanted == []


def test_columns_convention_is_drawn_so(running, tmp_path):
    place = tmp_path / "page.html"
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 3), (2, 4), (5, 4)))
    trace = ch.trace(q, k, v, convention="columns")
    trace.save(place)
    with opened(running, place) as (page, unwanted):
        _all_of(page)
        shown = page.locator("#step-output .figure text.number").all_text_contents()
        assert [float(x.replace("−", "-")) for x in shown[-15:]] == pytest.approx(trace.output.ravel().round(2))
        assert unwanted == []


def test_a_wrong_claim_is_shown_at_its_step(running, tmp_path):
    from clearhead.claims import check_file

    case = check_file(Path(__file__).parents[1] / "examples/wrong.json")
    case.save(tmp_path / "page.html")
    with opened(running, tmp_path / "page.html") as (page, _):
        assert "not Q·Kᵀ" in page.locator("#step-scores .verdict.wrong").text_content()


def test_a_notebook_gets_text_a_picture_and_a_frame():
    bundle = ch.trace(Q, K, V)._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/svg+xml", "text/html"}
    assert bundle["text/html"].startswith('<iframe sandbox="allow-scripts allow-downloads"')
    assert "S = Q·Kᵀ" in bundle["text/plain"]


def _all_of(page):
    """Scroll through the page, so that everything is drawn."""
    page.evaluate(
        "async () => { for (let y = 0; y < document.body.scrollHeight; y += 400) {"
        " scrollTo({top: y, behavior: 'instant'}); await new Promise(requestAnimationFrame) }"
        " scrollTo({top: 0, behavior: 'instant'}) }"
    )
    until(page, "document.querySelectorAll('.hold:empty').length === 0")
