"""The page in a real browser, and the file it comes in."""

import dataclasses
import json
import re
import shutil
import types
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from browser import draw_all, opened, until
from clearhead.core.arrays import bfloat16
from clearhead.errors import FileError, RuleError, ShapeError
from clearhead.explaining.steps import steps_of_text
from clearhead.models import model as gpt2
from clearhead.view import page as writing
from clearhead.view.container import Document, parts
from page_files import HOSTILE, bytes_of, header_in, header_of, scripts, unpacked
from terminal import call

TEXT = "humpty dumpty sat on"
Q, K, V = (np.array(x) for x in ([[1, 3], [2, 0.5]], [[0.5, 2], [1, 3]], [[0.0, 4], [1, 2]]))


@pytest.fixture(scope="module")
def seen():
    return steps_of_text(TEXT, gpt2.load())


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


# the file


def test_the_file_refers_to_no_other_address():
    text = ch.trace(Q, K, V).to_html()
    places = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"'`)]*", re.sub(r'text/plain" id="[^<]*', "", text)))
    assert places <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}


def test_arrays_are_read_back_unchanged_also_over_several_blocks():
    rng = np.random.default_rng(0)
    passed = {
        "a": rng.standard_normal((3, 5)),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": np.array([True, False]),
        "d": np.arange(4)[::-1],
        "e": rng.standard_normal((2, 3)).astype(bfloat16).T,
    }
    result = dict(parts(Document({"kind": "none"}, passed), block=64))
    header = header_in(result.pop("clearhead"))
    data = b"".join(bytes_of(text) for text in result.values())
    assert len(result) == -(-len(data) // 64) > 1
    for name, array in passed.items():
        entry = header["arrays"][name]
        assert entry["at"] % 8 == 0
        stored = unpacked(data[entry["at"] :][: entry["packed"]], np.dtype(entry["dtype"])).reshape(entry["shape"])
        assert np.array_equal(stored, array), name


def test_markup_in_tokens_closes_no_element():
    text = _page_with(HOSTILE)
    result = scripts(text)
    assert header_of(text)["tokens"] == list(HOSTILE)
    assert set(result) <= {"clearhead", "clearhead-0", "program"}
    assert b"\x00" not in text.encode("utf-8", "xmlcharrefreplace")


def test_a_page_without_its_model_is_small_and_says_what_it_lacks(running, tmp_path):
    shutil.copytree(str(files("clearhead") / "models" / "rhymes"), tmp_path / "copy")
    seen = ch.explain(TEXT, ch.load_model(tmp_path / "copy"))
    assert len(seen.to_html().encode()) <= 285_000
    with drawn(running, seen.steps(1, 0).to_html()) as page:
        for step in ("qkv", "output"):
            assert "not in this file" in page.locator(f"#step-{step}").text_content()
        page.locator("#pick-layer").select_option("0")
        draw_all(page)
        assert "X" not in page.locator("#step-qkv").text_content()
        assert "not in this file" in page.locator("#step-output").text_content()


def test_the_page_stays_small():
    (program,) = Path(writing.__file__).parent.glob("*.js")
    assert program.stat().st_size <= 160_000
    assert program.with_suffix(".css").stat().st_size <= 24_000


def _page_with(tokens):
    size = len(tokens)
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, size, 4))
    document = ch.trace(q, k, v, causal=True).document(tokens=tokens)
    return writing.html(dataclasses.replace(document, header=document.header | {"title": tokens[0]}))


# the browser


@contextmanager
def drawn(running, page, *size, **options):
    """A page with all of its figures."""
    with opened(running, page, *size, **options) as shown:
        draw_all(shown)
        yield shown


@pytest.mark.smoke
def test_weights_keyboard_and_another_layer(running, explained, seen):
    with drawn(running, explained) as page:
        assert page.locator(".step").count() >= 7
        assert page.locator(".figure").count() >= 6
        page.locator("#step-weights details.numbers summary").click()
        matrix = ch.AttentionMatrix(seen.run.q, seen.run.k, causal=True)[seen.head]
        until(page, f"document.querySelectorAll('#step-weights tbody tr').length === {len(matrix)}")
        for i, row in enumerate(page.locator("#step-weights tbody tr").all()):
            for j, text in enumerate(row.locator("td").all_text_contents()):
                assert (text == "masked") if j > i else abs(float(text) - matrix[i, j]) < 1e-4
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
        other = (seen.layer + 1) % 2
        page.locator("#pick-layer").select_option(str(other))
        draw_all(page)
        page.locator("#step-output details.numbers summary").last.click()
        page.locator("#step-output tbody td").first.wait_for()
        shown = page.locator("#step-output figure:last-child tbody tr").first.locator("td").all_text_contents()
        assert [float(x.replace("−", "-")) for x in shown] == pytest.approx(seen.runs[other].output[0, :12], abs=1e-4)


@pytest.mark.smoke
def test_theme_pointing_and_printing(running, traced):
    with opened(running, traced, color_scheme="dark") as page:
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
        draw_all(page)
        assert page.locator(".step").count() >= 7
        assert page.locator(".figure").count() >= 6
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


def test_markup_in_tokens_is_shown_as_text(running, tmp_path):
    place = tmp_path / "hostile.html"
    place.write_bytes(_page_with(HOSTILE).encode("utf-8", "xmlcharrefreplace"))
    with drawn(running, place) as page:
        page.locator("#step-one button").first.click()
        assert page.evaluate("window.bad") is None
        assert page.locator("main img").count() == 0
        assert "<script>windo…" in page.locator("#pick-query").text_content()


# the step bar

MAP_IS_DRAWN = "document.querySelector('.map-of')?.dataset.missing === '0'"  # and moves the steps below no more


@pytest.mark.parametrize(
    ("window", "step", "motion"), [((1280, 900), "weights", "no-preference"), ((390, 700), "output", "reduce")]
)
def test_the_step_bar_leads_to_its_step_on_a_fresh_page(running, explained, step, window, motion):
    with opened(running, explained, *window, reduced_motion=motion) as page:
        until(page, MAP_IS_DRAWN)
        page.locator(f".map a[data-step={step}]").evaluate("link => link.click()")
        assert _lands(page, step)
        assert page.evaluate("document.activeElement.id") == f"step-{step}-title"
        assert page.evaluate("location.hash") == f"#step-{step}"


def test_a_link_to_a_step_works_also_in_a_frame(running, explained, tmp_path):
    with opened(running, explained, place="#step-output") as page:
        assert _lands(page, "output")
        page.evaluate("location.hash = '#step-scores'")
        assert _lands(page, "scores")
    frame = tmp_path / "frame.html"
    framed = writing.framed(explained.read_text(encoding="utf-8"))
    frame.write_text(f'<!doctype html><meta charset="utf-8">{framed}', encoding="utf-8")
    with opened(running, frame, wait="iframe") as page:
        page.frame_locator("iframe").locator(".step").first.wait_for()
        inside = page.frames[1]
        until(inside, MAP_IS_DRAWN)
        inside.evaluate("document.querySelector('.map a[data-step=output]').click()")
        assert _lands(inside, "output")


def _lands(page, step):
    """The step's heading ends up right below the bar, or the page cannot scroll further."""
    gap = f"""(() => {{
        const top = document.querySelector("#step-{step}").getBoundingClientRect().top;
        const below = top - document.querySelector(".map").getBoundingClientRect().bottom;
        const end = scrollY + innerHeight >= document.documentElement.scrollHeight - 2;
        return Math.abs(below) < 8 || (end && top > 0 && top < innerHeight);
    }})()"""
    until(page, gap)
    page.wait_for_timeout(400)
    return page.evaluate(gap)


def test_a_pinned_cell_stays_and_the_rest_is_not_drawn_again(running):
    trace = ch.trace(*np.random.default_rng(2).standard_normal((3, 24, 6)), causal=True)
    with drawn(running, trace.to_html()) as page:
        figure = page.locator("#step-weights .figure")
        figure.scroll_into_view_if_needed()
        page.evaluate("window.kept = [...document.querySelectorAll('.figure')]")
        box = figure.bounding_box()
        for dx, dy in ((620, 200), (700, 330), (640, 140)):
            page.mouse.click(box["x"] + dx, box["y"] + dy)
            page.wait_for_timeout(100)
            now = figure.bounding_box()
            assert abs(now["y"] - box["y"]) < 1
        assert page.evaluate("window.kept.every(each => each.isConnected)")
        assert page.locator("#pick-query").input_value() != "23"


def test_the_keyboard_goes_from_queries_to_keys_and_values(running):
    x, w_q, w_k, w_v = np.random.default_rng(2).standard_normal((4, 4, 4))
    with drawn(running, ch.trace_layer(x, w_q, w_k, w_v).to_html()) as page:
        page.locator("#step-qkv .figure").first.focus()
        written = page.locator("#step-qkv .written").first
        for key, start in (("Up", "q2,0"), ("Left", "q2,0"), *[("Right", "q2,")] * 3, ("Right", "k2,0")):
            page.keyboard.press(f"Arrow{key}")
            assert written.text_content().startswith(start)
        for _ in range(4):
            page.keyboard.press("ArrowRight")
        assert written.text_content().startswith("v2,0")
        page.keyboard.press("ArrowLeft")
        assert written.text_content().startswith("k2,3")


def test_with_a_sink_the_page_does_not_say_that_rows_sum_to_one(running):
    trace = ch.trace(Q, K, V, sinks=np.array([3.0]))
    with drawn(running, trace.to_html()) as page:
        text = page.locator("#step-weights").text_content()
        assert "its sink's share sum to 1" in text
        share = 1 - trace.weights[1].sum()
        assert f"{share:.4f}" in text


def test_a_wrong_worked_example_says_so_at_the_top(running, tmp_path):
    call("trace", Path(__file__).parents[1] / "examples/wrong.json", "--html", tmp_path / "wrong.html")
    with opened(running, tmp_path / "wrong.html") as page:
        said = page.locator("p.so")
        assert "K is not transposed" in said.text_content()
        assert said.bounding_box()["y"] < 200


def test_given_tokens_name_rows_and_columns(running):
    trace = ch.trace(*np.random.default_rng(2).standard_normal((3, 4, 2)), causal=True)
    tokens = ["</script><b>", " one", " two", "x" * 999]
    with drawn(running, trace.to_html(tokens=tokens)) as page:
        assert "1 ␣one" in page.locator("#pick-query").text_content()
        assert page.locator("main b b").count() == 0
    cross = ch.trace(np.eye(2, 3), np.eye(4, 3), np.eye(4, 2))
    header = header_of(cross.to_html(tokens=["a", "b"], source_tokens=list("wxyz")))
    assert (header["tokens"], header["sources"]) == (["a", "b"], ["w", "x", "y", "z"])
    later = ch.trace(np.eye(2, 3), np.eye(4, 3), np.eye(4, 2), causal=True, query_offset=2)
    header = header_of(later.to_html(tokens=list("wxyz")))
    assert (header["tokens"], header["sources"]) == (["y", "z"], ["w", "x", "y", "z"])
    for passed, error, words in (
        ({"tokens": list("abc")}, ShapeError, "3 strings for 4 keys"),
        ({"tokens": "abcd"}, RuleError, "expected a list of strings"),
        ({"source_tokens": list("wxyz")}, RuleError, "nothing names the queries"),
    ):
        with pytest.raises(error, match=words):
            later.to_html(**passed)
    with pytest.raises(ShapeError, match="they are two texts"):
        cross.to_html(tokens=list("wxyz"))


def test_wrong_file_names_and_options_of_a_page_are_refused(seen, tmp_path):
    matrix = ch.AttentionMatrix(Q, K)
    for thing in (ch.trace(Q, K, V), matrix, seen):
        with pytest.raises(FileError, match=r"x.npz: the name of a page must end"):
            thing.save(tmp_path / "x.npz")
        with pytest.raises(RuleError, match="language is 'fr'"):
            thing.to_html(language="fr")
    with pytest.raises(RuleError, match="title is 3"):
        matrix.save(tmp_path / "x.html", title=3)
    assert list(tmp_path.iterdir()) == []


def test_the_page_shows_the_name_of_the_model_and_not_its_path(seen, tmp_path):
    (tmp_path / "my-gpt2").mkdir()
    inner = seen.model
    model = types.SimpleNamespace(name=str(tmp_path / "my-gpt2"), config=inner.config, projections=inner.projections)
    text = dataclasses.replace(seen, model=model).to_html()
    assert header_of(text)["facts"]["model"]["en"].startswith("model my-gpt2: ")
    assert str(tmp_path) not in json.dumps(header_of(text))


ODD = {
    "no keys": ((2, 3), (0, 3), (0, 2)),
    "no queries": ((0, 3), (2, 3), (2, 2)),
    "no d_k": ((2, 0), (3, 0), (3, 2)),
    "one number": ((1, 1), (1, 1), (1, 1)),
    "many queries": ((300, 2), (3, 2), (3, 1)),
}


@pytest.mark.parametrize("odd", [*ODD, "NaN", "infinite", "nothing seen"])
def test_odd_shapes_and_numbers_are_drawn_without_an_error(running, odd):
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal(shape) for shape in ODD.get(odd, ((3, 2),) * 3))
    if odd in ("NaN", "infinite"):
        q[1, 0] = {"NaN": np.nan, "infinite": np.inf}[odd]
    rules = {"mask": np.zeros((3, 3), bool)} if odd == "nothing seen" else {}
    with drawn(running, ch.trace(q, k, v, **rules).to_html()):
        pass


def test_the_columns_convention_is_drawn_in_columns(running):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 3), (2, 4), (5, 4)))
    trace = ch.trace(q, k, v, convention="columns")
    with drawn(running, trace.to_html()) as page:
        page.locator("#step-scores .figure").focus()
        for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowLeft", "ArrowLeft", "ArrowDown"):
            page.keyboard.press(key)
        written = page.locator("#step-scores .written").text_content()
        s = trace.scores[1, 0]
        assert written.startswith("s1,0 = k1·q0 = ")
        assert f"= {s:.5g}".replace("-", "−") in written
        assert page.locator(".live").count() == 1
        assert "the query's weights sum to 1" in page.locator("#step-weights").text_content()
        assert "row" not in page.locator("main").inner_text().replace("arrow", "")
        shown = page.locator("#step-output .figure text.number").all_text_contents()
        assert [float(x.replace("−", "-")) for x in shown[-15:]] == pytest.approx(trace.output.ravel().round(2))


def test_a_wrong_claim_is_shown_at_its_step(running, tmp_path):
    from clearhead.diagnosing.claims import check_file

    case = check_file(Path(__file__).parents[1] / "examples/wrong.json")
    case.save(tmp_path / "page.html")
    with opened(running, tmp_path / "page.html") as page:
        assert "not Q·Kᵀ" in page.locator("#step-scores .verdict.wrong").text_content()
