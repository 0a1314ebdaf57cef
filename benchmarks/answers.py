"""Pages that explain an answer: bytes, first picture, reaction to the pointer, and whether they fit a screen.

python -m benchmarks.answers [--quick]      needs chromium; a second page size is that of a phone

The models have random weights, and the numbers of `ch.why` are random too, since running 1,536 heads one by one says
nothing of a page. The run, its weights, steps and derivatives are those of the model.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import MEASURE, browser, measured
from clearhead.explaining import rerun
from clearhead.explaining.answers import Target
from clearhead.explaining.why import Why
from clearhead.explaining.why_lists import Candidate, EdgeEffect, HeadEffect, PartEffect
from clearhead.models import model as shipped
from clearhead.models.model import Model, of_arrays

MODELS = ((30, 9, 64), (48, 32, 16))  # layers, heads, d_k
LENGTHS = 5, 400, 2000
SCREENS = (1280, 800), (390, 844)
HOVERS = 20
POINT = "hover to the head's words"
FIRST = """new MutationObserver((_, self) => {
    if (!document.querySelector(".effects button")) return;
    self.disconnect();
    requestAnimationFrame(() => {
        const { port1, port2 } = new MessageChannel();
        port1.onmessage = () => performance.mark("first");
        port2.postMessage(0);
    });
}).observe(document, { subtree: true, childList: true });"""


def random_model(layers: int, heads: int, width: int, positions: int) -> Model:
    """A decoder of random weights with the tokenizer of the model that comes with the package."""
    rng, d, known = np.random.default_rng(0), heads * width, shipped.load()

    def drawn(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32) / np.sqrt(shape[0])

    data = {"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": d, "n_positions": positions}
    size = known.config.vocabulary
    arrays = {"wte.weight": drawn(size, d), "wpe.weight": drawn(positions, d)}
    arrays |= {"ln_f.weight": np.ones(d, np.float32), "ln_f.bias": np.zeros(d, np.float32)}
    for layer in range(layers):
        name = f"h.{layer}."
        for norm in ("ln_1", "ln_2"):
            arrays |= {f"{name}{norm}.weight": np.ones(d, np.float32), f"{name}{norm}.bias": np.zeros(d, np.float32)}
        for part, rows, columns in (
            ("attn.c_attn", d, 3 * d),
            ("attn.c_proj", d, d),
            ("mlp.c_fc", d, 4 * d),
            ("mlp.c_proj", 4 * d, d),
        ):
            arrays |= {
                f"{name}{part}.weight": drawn(rows, columns),
                f"{name}{part}.bias": np.zeros(columns, np.float32),
            }
    made = of_arrays("random", {**data, "vocab_size": size, "layer_norm_epsilon": 1e-5}, arrays)
    return Model("random", made.decoder, known.tokenizer)


def answered(model: Model, tokens: int) -> Why:
    """What `ch.why` would give for a text of so many words, with random effects."""
    rng, (layers, heads) = np.random.default_rng(1), (model.config.layers, model.config.heads)
    text = " ".join(rng.choice(["mary", "had", "a", "little", "lamb", "its", "fleece", "was"], tokens))
    read = model.tokens(text)
    run = model.run([token.id for token in read])
    order = np.argsort(-np.asarray(run.logits[-1]))[:5]
    ahead = [
        Candidate(int(i), model.text(int(i)), 0.5**place, float(run.logits[-1][i])) for place, i in enumerate(order, 1)
    ]
    target = Target(list(run.ids), (ahead[0].id,), None, odds=True)
    places = rng.permutation(layers * heads)[:8]
    edges = [
        EdgeEffect(
            *divmod(int(place), heads), len(read) - 1, int(rng.integers(len(read))), *rng.uniform(0, 1, 5).tolist()
        )
        for place in places
    ]
    parts = [
        PartEffect(token.text, token.start, token.stop, (i,), float(x), float(-x), 0.3)
        for i, (token, x) in enumerate(zip(read, rng.standard_normal(len(read)), strict=True))
    ]
    based = rerun.based_on(target, run)
    return Why(
        model=model, text=text, tokens=read, answer=ahead[0].text, token=ahead[0], against=ahead[1], compared=False,
        other=ahead[1].text, value=based.value, parts=parts, pairs=[], by_token=np.array([p.effect for p in parts]),
        by_head=rng.standard_normal((layers, heads)), heads=[HeadEffect(*e[:2], 0.1, e.truth, e) for e in edges],
        heads_run=rng.standard_normal((layers, heads)), edges=edges, total=1.0, gap=0.0, points=4, missed=False,
        next=ahead, prompt=text, based=[based],
    )  # fmt: skip


def opened(running: Any, place: Path, screen: tuple[int, int]) -> tuple[float, float, float, int]:
    """Seconds to the first picture; median and worst ms from the pointer to a head's words; where these end."""
    context = running.new_context(viewport=dict(zip(("width", "height"), screen, strict=True)), offline=True)
    context.add_init_script(FIRST)
    tab = context.new_page()
    tab.goto(place.as_uri(), timeout=120_000)
    tab.wait_for_timeout(2500)
    first = tab.evaluate("performance.getEntriesByName('first')[0].startTime")
    tab.evaluate(MEASURE, [POINT, "pointerover", ".every .caption", ".effects button"])
    cells = tab.locator(".effects button")
    for turn in range(HOVERS):
        tab.evaluate("name => void (window.awaited = name)", POINT)
        cells.nth((turn * 97 + 5) % cells.count()).hover()
        tab.wait_for_timeout(150)
    times = measured(tab, POINT)
    bottom = tab.evaluate("document.querySelector('.every .caption').getBoundingClientRect().bottom + scrollY")
    context.close()
    return first / 1000, float(np.median(times)), max(times), int(bottom)


def main(arguments: list[str]) -> None:
    print("| heads | tokens | MB | screen | first picture, s | hover, ms: median | worst | last line ends at, px |")
    print("| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder, browser() as running:
        for layers, heads, width in MODELS[:1] if "--quick" in arguments else MODELS:
            model = random_model(layers, heads, width, max(LENGTHS))
            for tokens in LENGTHS[:2] if "--quick" in arguments else LENGTHS:
                place = Path(folder) / "page.html"
                answered(model, tokens).save(place)
                for screen in SCREENS:
                    first, usual, worst, bottom = opened(running, place, screen)
                    facts = f"{place.stat().st_size / 1e6:.1f} | {screen[0]} × {screen[1]} | {first:.2f}"
                    print(
                        f"| {layers} × {heads} | {tokens} | {facts} | {usual:.0f} | {worst:.0f} | {bottom} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main(sys.argv[1:])
