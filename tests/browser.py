"""A page opened from disk in a real browser without a network."""

import os
import shutil
from contextlib import contextmanager

import pytest

_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
_QUIET = ("--disable-component-update", "--disable-sync")
_AWAKE = ("--disable-renderer-backgrounding", "--disable-backgrounding-occluded-windows")
BROWSER = os.environ.get("CLEARHEAD_BROWSER") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser():
    """A running browser; the tests that need one are skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if BROWSER is None:
        pytest.skip("no chromium is installed: apt-get install chromium, or name one with CLEARHEAD_BROWSER")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=BROWSER, args=[*_FLAGS, *_QUIET, *_AWAKE])
        yield running
        running.close()


@contextmanager
def opened(running, path, width=1280, height=900, wait=".step", place="", script="", **options):
    """The page, and a list of everything unwanted: requests, console messages, errors; `script` runs before its own."""
    context = running.new_context(viewport={"width": width, "height": height}, offline=True, **options)
    context.add_init_script(script)
    page, unwanted = context.new_page(), []
    page.on("console", lambda message: unwanted.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: unwanted.append(f"error: {error}"))
    page.on("request", lambda request: request.url.startswith("file:") or unwanted.append(f"asks for {request.url}"))
    page.goto(path.as_uri() + place)
    page.wait_for_selector(wait)
    yield page, unwanted
    context.close()


def until(page, expression, patience=30_000):
    """Wait until an expression is true; Playwright's own wait evaluates strings, which the page's policy forbids."""
    for _ in range(patience // 50):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")
