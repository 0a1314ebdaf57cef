"""A page opened from disk in a real browser without a network."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from clearhead.view.page import encoded

_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
_QUIET = ("--disable-component-update", "--disable-sync", "--font-render-hinting=none")  # all browsers set text alike
# Two pages of its window's address bar, which nobody sees, cost each context half as much as the page that is tested.
# The other three are switched off by Playwright, whose list this one replaces.
_BARE = "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup,PaintHolding,OptimizationHints,PreconnectToSearch"
_AWAKE = ("--disable-renderer-backgrounding", "--disable-backgrounding-occluded-windows")
_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser")  # the first, without windows, takes a quarter less
BROWSER = os.environ.get("CLEARHEAD_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)
_AXE = Path(__file__).parents[1] / "page/node_modules/axe-core/axe.min.js"


@contextmanager
def browser():
    """A running browser; the tests that need one are skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no chromium: apt-get install chromium-headless-shell, or name one with CLEARHEAD_BROWSER")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=BROWSER, args=[*_FLAGS, *_QUIET, *_AWAKE, _BARE])
        yield running
        running.close()


@contextmanager
def opened(running, page, width=1280, height=900, wait=".step", place="", script="", **options):
    """A page, by its file, its HTML or its document, opened in a browser that has no network.

    It fails where the page requests anything, writes to the console or raises. `place` is the end of its address;
    `script` runs before the page's own.
    """
    if not isinstance(page, Path):
        data = page.encode("utf-8", "xmlcharrefreplace") if isinstance(page, str) else encoded(page)
        with TemporaryDirectory() as folder:
            (Path(folder) / "page.html").write_bytes(data)
            with opened(running, Path(folder) / "page.html", width, height, wait, place, script, **options) as shown:
                yield shown
        return
    context = running.new_context(viewport={"width": width, "height": height}, offline=True, **options)
    context.add_init_script(script)
    unwanted = []
    shown = listened(context.new_page(), unwanted)
    shown.on("request", lambda request: request.url.startswith("file:") or unwanted.append(f"asks for {request.url}"))
    shown.goto(page.as_uri() + place)
    shown.wait_for_selector(wait)
    yield shown
    assert unwanted == []
    context.close()


def listened(page, unwanted):
    """The page, whose console messages and errors go to a list."""
    page.on("console", lambda message: unwanted.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: unwanted.append(f"error: {error}"))
    return page


def until(page, expression, patience=30_000):
    """Wait until an expression is true; Playwright's own wait evaluates strings, which the page's policy forbids."""
    for _ in range(patience // 50):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


def axe(page, within="document"):
    """What axe-core says against the page's accessibility; open it with bypass_csp."""
    if not _AXE.exists():
        pytest.skip("axe-core is not installed: npm ci in page/")
    page.evaluate(_AXE.read_text(encoding="utf-8"))
    return page.evaluate(
        f"axe.run({within}).then(r => r.violations.map(v => v.id + ': ' + v.nodes[0].html.slice(0, 200)))"
    )


def number(text):
    """A number as the page prints it, with a true minus sign; of a percentage or a multiple what is before that."""
    return float(text.replace("−", "-").replace("+", "").rstrip("%×"))


def draw_all(page):
    """Scroll through the page until everything is drawn; a browser that draws no frames is not waited for."""
    empty = "document.querySelectorAll('.hold:empty').length"
    page.evaluate("for (const each of document.querySelectorAll('details.fold')) each.open = true")
    for _ in range(20):  # a busy machine may skip the frames of some places
        page.evaluate(
            "async () => { for (let y = 0; y < document.body.scrollHeight; y += 400) {"
            " scrollTo({top: y, behavior: 'instant'});"
            " await new Promise(done => { requestAnimationFrame(done); setTimeout(done, 1000) }) }"
            " scrollTo({top: 0, behavior: 'instant'}) }"
        )
        page.wait_for_timeout(50)
        if page.evaluate(empty) == 0:
            return
    raise AssertionError(f"{page.evaluate(empty)} parts of the page stay empty")
