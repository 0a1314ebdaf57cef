"""Pages of attention beside BertViz, CircuitsVis and Inspectus: bytes, time to write, to the first picture, to react.

python benchmarks/pages.py [--quick]      needs chromium; peers are measured where they are installed

Queries and keys are drawn from N(0, 1) in bfloat16, causal: the widest weights and the worst case for compression.
Peers get the same weights in float32, and each writes its page in its own way.

Then how long one page takes from a pointer on a word to the shaded text, and from a click to the arithmetic: from the
event to the first task after the frame that shows it, by `performance.measure` in the page.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import clearhead as ch
from clearhead.core.arrays import bfloat16
from clearhead.view import page
from clearhead.view.container import Document
from clearhead.view.long import ShownLayer, ShownRun, document

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
# name, layers, heads, tokens, d_k, budget in MB, measured in the browser
CASES: tuple[tuple[str, int, int, int, int, float], ...] = (
    ("12 × 12 heads, 128 tokens", 12, 12, 128, 64, 6),
    ("12 × 12 heads, 512 tokens", 12, 12, 512, 64, 6),
    ("32 × 32 heads, 8,192 tokens", 32, 32, 8192, 128, 6),
    ("1 head, 100,000 tokens", 1, 1, 100_000, 128, 55),
)

REACTING = (12, 12, 1000, 64)  # layers, heads, tokens, d_k = d_v
TIMES = 30
BUDGETS = {"hover to shading": 50, "click to arithmetic": 100}  # ms; and 1,000 to the first picture
MEASURE = """([name, type, changes]) => {
    let start = null;
    document.addEventListener(type, ({ target, timeStamp }) => {
        if (window.awaited !== name || !target.matches?.(".token")) return;
        window.awaited = null;
        start = timeStamp;
    }, true);
    new MutationObserver(() => {
        if (start === null) return;
        const since = start;
        start = null;
        requestAnimationFrame(() => {
            const { port1, port2 } = new MessageChannel();
            port1.onmessage = () => performance.measure(name, { start: since });
            port2.postMessage(0);
        });
    }).observe(document.querySelector(changes), { subtree: true, childList: true, attributes: true });
}"""


def runs(layers: int, heads: int, n: int, d: int) -> tuple[list[ShownRun], list[Any]]:
    rng = np.random.default_rng(0)
    matrices = []
    for _ in range(layers):
        q, k = (rng.standard_normal((1, heads, n, d), dtype=np.float32).astype(bfloat16) for _ in "qk")
        matrices.append(ch.AttentionMatrix(q, k, causal=True))
    layers = [ShownLayer(str(place), range(heads), matrix.part(0)) for place, matrix in enumerate(matrices)]
    return [ShownRun("model", layers, [f" w{place}" for place in range(n)])], matrices


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    place = os.environ.get("CLEARHEAD_BROWSER") or shutil.which("chromium")
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=place, args=[*FLAGS])
        yield running
        running.close()


def first_picture(running: Any, place: Path) -> tuple[float, float]:
    """Seconds to the first picture, and to the first numbers and all tiles, from the start of loading."""
    tab = running.new_context(viewport={"width": 1280, "height": 900}, offline=True).new_page()
    tab.goto(place.as_uri(), timeout=120_000)
    while not tab.evaluate("document.querySelector('#readout')?.textContent"):
        tab.wait_for_timeout(10)
    picture = tab.evaluate("performance.getEntriesByName('clearhead picture')[0].startTime") / 1000
    while tab.get_attribute(".map-of", "data-missing") != "0":
        tab.wait_for_timeout(10)
    whole = tab.evaluate("performance.now()") / 1000
    tab.context.close()
    return picture, whole


def tile_time(running: Any, place: Path) -> float:
    """Seconds for each 256 × 256 tile of single weights: the median of what the page itself measured."""
    tab = running.new_context(viewport={"width": 1280, "height": 900}, offline=True).new_page()
    tab.goto(place.as_uri(), timeout=120_000)
    while not tab.evaluate("document.querySelector('#readout')?.textContent"):
        tab.wait_for_timeout(10)
    for _ in range(12):
        tab.keyboard.press("+")
    deadline = time.monotonic() + 120
    while "each cell is one weight" not in tab.text_content(".where") and time.monotonic() < deadline:
        tab.wait_for_timeout(10)
    while tab.get_attribute(".map-of", "data-missing") != "0":
        tab.wait_for_timeout(10)
    times = tab.evaluate("performance.getEntriesByName('clearhead tile').map((entry) => entry.duration)")
    tab.context.close()
    return float(np.median(times)) / 1000 if times else float("nan")


def reacting(layers: int, heads: int, n: int, d: int) -> Document:
    """A page with values, and with ten next tokens after each token."""
    (run,), _ = runs(layers, heads, n, d)
    rng = np.random.default_rng(1)
    values = [rng.standard_normal((1, heads, n, d), dtype=np.float32).astype(bfloat16) for _ in range(layers)]
    shown = [replace(layer, v=v) for layer, v in zip(run.layers, values, strict=True)]
    made = document([replace(run, layers=shown)], "reacting")
    following = [[[f" w{rng.integers(n)}", 0.1 - 0.01 * place] for place in range(10)] for _ in range(n)]
    return replace(made, header={**made.header, "facts": {"next": following[-1], "following": following}})


def reactions(running: Any, place: Path) -> tuple[dict[str, list[float]], float]:
    """Milliseconds of each reaction, and to the first picture."""
    tab = running.new_context(viewport={"width": 1280, "height": 900}, offline=True).new_page()
    tab.goto(place.as_uri(), timeout=120_000)
    painted = "[...document.querySelectorAll('.heads canvas')].every((each) => each.dataset.missing === '0')"
    while not tab.evaluate(f"document.querySelector('.lines')?.children.length > 5 && {painted}"):
        tab.wait_for_timeout(50)
    tab.wait_for_timeout(1000)
    picture = tab.evaluate("performance.getEntriesByName('clearhead picture')[0].startTime")
    for name, kind, changes in (
        ("hover to shading", "pointerover", ".passage"),
        ("click to arithmetic", "click", ".lines"),
    ):
        tab.evaluate(MEASURE, [name, kind, changes])
    tokens = tab.locator(".passage .token")
    count = tokens.count()
    for position in range(TIMES):
        token = tokens.nth((position * 389 + 200) % count)
        token.scroll_into_view_if_needed()
        tab.mouse.move(2, 2)  # a word that scrolled under the pointer is left first
        tab.wait_for_timeout(100)
        for name, act in (("hover to shading", token.hover), ("click to arithmetic", token.click)):
            tab.evaluate("name => void (window.awaited = name)", name)
            act()
            tab.wait_for_timeout(400)
    read = "name => performance.getEntriesByName(name).map((entry) => entry.duration)"
    results = {name: [float(x) for x in tab.evaluate(read, name)] for name in BUDGETS}
    tab.context.close()
    return results, picture


def bertviz(weights: list[Any], tokens: list[str]) -> str:
    import torch
    from bertviz import model_view

    return str(model_view([torch.from_numpy(w) for w in weights], tokens, html_action="return").data)


def circuitsvis(weights: list[Any], tokens: list[str]) -> str:
    from circuitsvis.attention import attention_patterns

    return "".join(str(attention_patterns(tokens=tokens, attention=w[0])) for w in weights)


def inspectus(weights: list[Any], _tokens: list[str]) -> str:
    """Its data alone, as base64 of float32, since it cannot write a page."""
    from base64 import b64encode

    return "".join(b64encode(w.tobytes()).decode() for w in weights)


PEERS: tuple[tuple[str, Callable[[list[Any], list[str]], str]], ...] = (
    ("BertViz", bertviz), ("CircuitsVis", circuitsvis), ("Inspectus (data alone)", inspectus)
)  # fmt: skip


def print_reactions(running: Any, place: Path) -> None:
    place.write_bytes(page.encoded(reacting(*REACTING)))
    result, picture = reactions(running, place)
    print("\n| 12 × 12 heads, 1,000 tokens, with v and next tokens | times | median, ms | worst, ms | budget, ms |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, times in result.items():
        print(f"| {name} | {len(times)} | {np.median(times):.0f} | {max(times):.0f} | {BUDGETS[name]} |")
    print(f"| first picture | 1 | {picture:.0f} | {picture:.0f} | 1000 |")


def main(arguments: list[str]) -> None:
    quick = "--quick" in arguments
    print("| page | who | MB | budget | seconds to write | first picture, s | all tiles, s | a tile, ms |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder, browser() as running:
        for name, layers, heads, n, d, budget in CASES[:2] if quick else CASES:
            looked, matrices = runs(layers, heads, n, d)
            place = Path(folder) / "page.html"
            start = time.monotonic()
            place.write_bytes(page.encoded(document(looked, name)))
            took = time.monotonic() - start
            picture, whole = first_picture(running, place)
            tile = tile_time(running, place) * 1000 if n > 1024 else float("nan")
            size = place.stat().st_size / 1e6
            said = f"{picture:.2f} | {whole:.2f} | {'' if np.isnan(tile) else f'{tile:.0f}'}"
            print(f"| {name} | clearhead | {size:.2f} | {budget} | {took:.1f} | {said} |", flush=True)
            if n > 512:
                continue
            weights = [np.ascontiguousarray(matrix[...], np.float32) for matrix in matrices]
            for who, write in PEERS:
                try:
                    start = time.monotonic()
                    size = len(write(weights, list(looked[0].tokens or ()))) / 1e6
                    took = time.monotonic() - start
                    print(f"| {name} | {who} | {size:.1f} | | {took:.1f} | | | |", flush=True)
                except (ImportError, MemoryError) as error:
                    print(f"| {name} | {who} | {type(error).__name__}: {error} | | | | | |", flush=True)
        print_reactions(running, Path(folder) / "page.html")


if __name__ == "__main__":
    main(sys.argv[1:])
