"""The model that its page holds, run in a browser: other texts and changes give what the library computes."""

from dataclasses import dataclass, field, replace
from urllib.parse import urlencode

import numpy as np
import pytest

import clearhead as ch
from browser import axe, number, opened, until
from clearhead.explaining.steps import steps_of_text
from clearhead.explaining.why_page import numbers_of
from clearhead.explaining.why_words import conclusion
from clearhead.models import model as gpt2
from clearhead.models.protocol import Variant
from clearhead.spelling import spelled
from clearhead.view.page import encoded
from dense_gpt2 import WORDS, softmax
from seeds import fresh
from test_why_page import so, squares

ODD = (
    *("don't", "THE", "12 345", "naïve", "中文", "👩\u200d🚀", "İΣ"),
    *("\u0085x", " ", "\u3000", "?!", "<|endoftext|>", "\ufb01"),
)
READY = "document.querySelector('.try')?.getAttribute('aria-busy') === 'false'"
AT = """async (hash) => {
    location.hash = hash;
    const room = document.querySelector(".try");
    while (room.dataset.at !== location.hash) await new Promise(requestAnimationFrame);
    return [...document.querySelectorAll("#next li")].map((each) => [each.dataset.id, each.dataset.logit].map(Number));
}"""


@dataclass
class Change:
    """As page/src/types.d.ts has it."""

    hidden: list = field(default_factory=list)
    cuts: list = field(default_factory=list)
    off: list = field(default_factory=list)
    scale: str = "sqrt"
    causal: bool = True
    temperature: float = 1.0
    over: str = "rows"

    def address(self, text):
        lists = {
            name: "_".join(".".join(map(str, np.atleast_1d(each))) for each in getattr(self, name))
            for name in ("hidden", "cuts", "off")
        }
        plain = {"scale": self.scale, "causal": str(self.causal).lower(), "temperature": self.temperature}
        return "#" + urlencode({"try": text, **lists, **plain, "over": self.over})


@pytest.fixture(scope="module")
def model():
    return gpt2.load()


@pytest.fixture(scope="module")
def explained(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("live") / "page.html"
    steps_of_text("humpty dumpty sat on", model).save(place)
    return place


def drawn_change(rng, kind, n):
    """What explain hides, what ch.change edits, or everything together."""
    made, heads = Change(), [[layer, head] for layer in range(2) for head in range(8)]
    edges = [[*heads[i], *sorted(rng.integers(n, size=2).tolist(), reverse=True)] for i in rng.permutation(16)[:5]]
    if kind != "edits":
        made.hidden = rng.permutation(n)[: rng.integers(1, 4)].tolist()
    if kind != "hidden":
        made.cuts, made.off = edges, [heads[i] for i in rng.permutation(16)[: rng.integers(1, 4)]]
    if kind == "all":
        made.scale, made.causal = str(rng.choice(["sqrt", "d_k", "none"])), bool(rng.integers(2))
        made.temperature = float(2 ** rng.uniform(0, 3))  # below 1, scores without a scale make float32 too coarse
        made.over = str(rng.choice(["rows", "columns", "all"]))
    return made


def layers_of(model, ids, change):
    """Each layer's weights, and the stream after it."""
    n, decoder, inputs = len(ids), model.decoder, model.decoder.inputs(ids)
    stream = decoder.embedded([model.tokenizer.neutral, *ids[1:]] if 0 in change.hidden else ids)
    turns = decoder.turns(np.arange(n))
    for layer in range(2):
        run = decoder.layer(layer, stream, turns[layer], {}, [])
        seen = np.repeat(np.tri(n, dtype=bool)[None] | (not change.causal), 8, axis=0)
        seen &= ~np.isin(np.arange(n), [key for key in change.hidden if key]) | np.eye(n, dtype=bool)
        for _, head, i, j in (cut for cut in change.cuts if cut[0] == layer):
            seen[head, i, j] = False
        scale = {"sqrt": 1 / 8, "d_k": 1 / 64, "none": 1}[change.scale] / change.temperature
        if change.over == "rows":
            weights = ch.AttentionMatrix(run.q, run.k, scale=scale, mask=seen)
        else:
            scores = np.where(seen, run.q @ run.k.swapaxes(1, 2) * scale, -np.inf)
            flat = scores if change.over == "columns" else scores.reshape(8, -1)
            weights = softmax(flat, axis=1).reshape(scores.shape)
        heads = weights @ run.v
        for _, head in (off for off in change.off if off[0] == layer):
            heads[head] = 0
        stream = decoder.after(layer, stream, decoder.mixed(layer, heads), inputs[:, layer])
        yield weights, stream


def expected(model, ids, change, kind):
    """The last token's logits, by the library."""
    if kind == "edits":
        edits = [ch.off(layers=[layer], heads=[head]) for layer, head in change.off]
        edits += [ch.cut(queries=i, keys=j, layers=[layer], heads=[head]) for layer, head, i, j in change.cuts]
        with ch.change(model, edits):
            return np.asarray(model.run(ids).logits)[-1]
    n, neutral = len(ids), {0: model.tokenizer.neutral} if 0 in change.hidden else {}
    hidden = [key for key in change.hidden if key]
    if kind == "hidden":
        gates = np.where(np.isin(np.arange(n), hidden), -np.inf, 0.0)
        variant = Variant(gates, min(change.hidden), ids=neutral)
        return next(model.again(model.run(ids), [variant], range(n - 1, n)))[0]
    *_, (_, stream) = layers_of(model, ids, change)
    return model.decoder.logits(stream[-1:])[0]


@pytest.mark.parametrize("count", [pytest.param(9, marks=pytest.mark.smoke), 200])
def test_texts_and_changes_give_the_numbers_of_the_library(running, model, explained, count):
    rng = fresh()
    height = 900 if count < 100 else 200  # what is out of sight is not drawn
    with opened(running, explained, height=height, wait=".try") as page:
        until(page, READY)
        for place in range(count):
            words = rng.choice(WORDS.split(), rng.integers(2, 12)).tolist()
            words.insert(int(rng.integers(len(words))), str(rng.choice(ODD)))
            text, kind = " ".join(words), ("hidden", "edits", "all")[place % 3]
            ids = model.tokenizer.continuation(text)
            change = drawn_change(rng, kind, len(ids))
            result = page.evaluate(AT, change.address(text))
            logits = expected(model, ids, change, kind)
            assert len(result) == 8
            for token, logit in result:
                assert abs(logit - logits[int(token)]) <= 1e-4, (text, change)
            assert result[0][1] >= logits.max() - 1e-4


@pytest.mark.parametrize("over", ["rows", *(pytest.param(each, marks=pytest.mark.gate) for each in ("columns", "all"))])
def test_map_arithmetic_and_steps_show_the_changed_run(running, model, explained, over):
    rng, text = fresh(), "humpty dumpty sat on a wall and"
    ids = model.tokenizer.continuation(text)
    change = replace(drawn_change(rng, "all", len(ids)), over=over, off=[])
    layer, head, i = int(rng.integers(2)), int(rng.integers(8)), int(rng.integers(1, len(ids)))
    weights = [np.asarray(each) for each, _ in layers_of(model, ids, change)][layer][head]
    place = f"{change.address(text)}&at=0.{layer}.{head}&cell={i}.0"
    with opened(running, explained, wait=".map-of", place=place) as page:
        until(page, READY)
        until(page, f"document.querySelector('#readout').textContent.startsWith('query {i} ')")
        page.locator(".map-of").focus()
        for j in range(i + 1):
            said = page.locator("#readout").text_content().split(": ")[1]
            value = 0 if said == "masked" else number(said.split()[0])
            assert value == pytest.approx(weights[i, j], rel=2e-3, abs=1e-6), (said, change)
            made = page.locator(".lines b").all_text_contents()
            assert said == "masked" or any(number(x.split()[0]) == pytest.approx(value, rel=2e-3) for x in made)
            page.keyboard.press("ArrowRight")
            page.wait_for_timeout(50)
        page.locator(".map a[data-step=weights]").evaluate("link => link.click()")
        page.locator("#step-weights details.numbers summary").click()
        until(page, f"document.querySelectorAll('#step-weights tbody tr').length === {len(ids)}")
        for row, line in zip(page.locator("#step-weights tbody tr").all(), weights, strict=True):
            shown = [0 if x == "masked" else number(x) for x in row.locator("td").all_text_contents()]
            assert shown == pytest.approx(line, rel=2e-3, abs=1e-6)


def test_gestures_keys_and_the_way_back(running, model, explained):
    with opened(running, explained, wait=".try", bypass_csp=True) as page:
        until(page, READY)
        before = page.locator("#next").inner_text()
        page.locator(".passage .token").first.dblclick()
        until(page, "location.hash.includes('hidden=0')")
        page.locator("h1").click()
        for key in ("s", "m", "o", ">", "h", "c"):
            page.keyboard.press(key)
        until(page, "location.hash.includes('cuts=')")  # the address follows
        address = page.evaluate("location.hash")
        for part in ("scale=d_k", "causal=false", "over=columns", "temperature=1.18", "off=", "cuts="):
            assert part in address
        assert "replaced by <|endoftext|>, because" in page.locator(".try .ribbon").text_content()
        assert axe(page, "'.try'") == []
        page.keyboard.press("r")
        until(page, "document.querySelector('.try .ribbon').hidden")
        assert page.locator("#next").inner_text() == before
        page.keyboard.press("t")
        page.keyboard.press("End")
        page.keyboard.type(" a")
        page.locator("h1").click()
        page.keyboard.press("g")
        until(page, "document.querySelectorAll('.passage .token').length === 6")
        assert page.locator("#try-text").input_value() == "humpty dumpty sat on a wall"
        page.locator("#language").click()
        assert page.locator("#try-text").input_value() == "humpty dumpty sat on a wall"


def test_a_typed_text_and_another_word_get_their_causes_from_runs(running, model):
    text = str(fresh().choice(["humpty dumpty sat on", "jack and jill went up the", "mary had a"]))
    seen = ch.explain(text, model)
    with opened(running, ch.explain("the cow jumped", model).to_html(), wait=".try") as page:
        until(page, READY)
        page.locator("#try-text").fill(text)
        until(page, f"document.querySelector('.reply bdi')?.textContent === {spelled(seen.answer)!r}")
        shares = [so(seen, change) for change in seen.estimate.heads_run.ravel()]
        np.testing.assert_allclose([x for _, x in squares(page)], shares, rtol=0.02, atol=0.02)
        assert page.locator("p.so").text_content() == " ".join(conclusion(seen, "en"))
        assert seen.text in page.title()
        page.locator(".fold > summary").first.click()
        hidden = {part.text: so(seen, part.hidden) for part in seen.ranked}
        rows = page.locator(".fold section:first-child tbody tr").all()
        shown = {
            row.locator("th").text_content().split(" → ")[0]: number(row.locator("td").first.text_content())
            for row in rows
        }
        assert {name: shown[name] for name in hidden} == pytest.approx(hidden, rel=0.02, abs=0.02)
        page.locator(".choices button").nth(2).click()
        until(page, "document.querySelector('.choices [aria-pressed=true]').id === 'number-2'")
        other = ch.explain(text, model, against=numbers_of(seen)[1].against.text)
        shares = [so(other, change) for change in other.estimate.heads_run.ravel()]
        np.testing.assert_allclose([x for _, x in squares(page)], shares, rtol=0.02, atol=0.02)
        assert page.locator("p.so").text_content() == " ".join(conclusion(other, "en"))
        page.locator(".front h2").click()
        page.keyboard.press("h")
        pale = "getComputedStyle(document.querySelector('.picks .note')).opacity < 0.5"
        for waits in ("", "!"):  # what was said of the run before
            until(page, f"{waits}(document.querySelector('.causes').classList.contains('stale') && {pale})")
        assert "Why" in page.locator("h1").text_content()


def test_a_page_says_what_it_does_not_run(running, model):
    document = ch.explain("mary had a", model).to_html()
    with opened(running, document, wait=".try", script="delete window.WebAssembly") as page:
        until(page, "document.querySelector('[aria-busy=false] > .ribbon')?.textContent.includes('no WebAssembly')")
    with opened(running, document, wait=".try") as page:
        until(page, READY)
        page.fill("#try-text", "a " * 300)
        until(page, "document.querySelector('.try .ribbon').textContent.includes('reads at most 256 tokens')")
        page.fill("#try-text", "")  # no token is no text to run
        page.wait_for_timeout(1000)


def test_the_page_with_its_model_stays_small(model):
    assert len(encoded(ch.explain("humpty dumpty sat on")._document("en"))) <= 5_200_000


SLIDE = """async () => {
    const [slider, gaps] = [document.querySelector("#try-temperature"), []];
    for (let [step, last] = [0, performance.now()]; step < 120; step++) {
        slider.value = String(-3 + step / 20);
        slider.dispatchEvent(new Event("input"));
        await new Promise(requestAnimationFrame);
        gaps.push(performance.now() - last);
        last = performance.now();
    }
    return gaps.sort((a, b) => a - b);
}"""


@pytest.mark.long
def test_frames_while_a_slider_moves_are_printed(running, model, capsys):
    text = "mary had a little lamb its fleece was white as snow and"
    assert len(model.tokenizer.continuation(text)) == 12
    with opened(running, ch.explain(text, model).to_html(), wait=".try") as page:
        until(page, READY)
        gaps = page.evaluate(SLIDE)
        assert "temperature" in page.evaluate("location.hash") or page.locator(".try .ribbon").is_visible()
    with capsys.disabled():
        print(f"\nframes a second while a slider moves: {1000 / np.mean(gaps):.0f}; 9 of 10 within {gaps[107]:.0f} ms")
