"""Pages look as they did: pictures of fixed pages against those in tests/screenshots.

Every text is set in a font whose glyphs are all one box, so that no font of the machine matters; pictures are a quarter
of the page's size and are compared by tiles, so that antialiasing does not matter either.
`python tests/test_screenshots.py --renew` takes the pictures anew, after a change of looks that is meant.
"""

import sys
from base64 import b64encode
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

import clearhead as ch
from browser import browser, opened, until

pytest.importorskip("fontTools", reason="the font of the pictures is made by fontTools")
Image = pytest.importorskip("PIL.Image", reason="pictures are read by Pillow")

KEPT = Path(__file__).parent / "screenshots"
SMALLER, TILE = 4, 4  # a tile is 16 × 16 pixels of the page
FAR = 28.0  # levels of 255, the mean of a tile: a shift by a quarter of a pixel reaches 24, what is broken 34 and more
WIDE, PHONE = (1280, 800), (390, 844)
SHOTS = {  # page, window, theme
    "explain-light": ("explain", WIDE, "light"),
    "explain-phone-dark": ("explain", PHONE, "dark"),
    "why-light": ("why", WIDE, "light"),
    "why-phone-dark": ("why", PHONE, "dark"),
    "map-dark": ("map", WIDE, "dark"),
    "map-phone-light": ("map", PHONE, "light"),
}
IN_BOXES = """
    const font = new FontFace('box', Uint8Array.from(atob('FONT'), (c) => c.charCodeAt(0)));
    document.fonts.add(font);
    const style = new CSSStyleSheet();
    style.replaceSync('*, ::before, ::after, ::marker { font-family: box !important }');
    document.adoptedStyleSheets = [style];
    const pen = CanvasRenderingContext2D.prototype;
    const { set } = Object.getOwnPropertyDescriptor(pen, 'font');
    Object.defineProperty(pen, 'font', { set(name) { set.call(this, name.replace(/px .*/, 'px box')) } });
"""
DRAWN = """
    [...document.querySelectorAll('.map-of')].every((map) => map.dataset.missing === '0')
        && [...document.querySelectorAll('.heads canvas')].every((each) => each.dataset.missing === '0')
"""


@cache
def boxes() -> str:
    """A font with one glyph for all characters of the pages, as base64."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    pen = TTGlyphPen(None)
    pen.moveTo((60, 0))
    for point in ((60, 560), (440, 560), (440, 0)):
        pen.lineTo(point)
    pen.closePath()
    made = FontBuilder(1000, isTTF=True)
    made.setupGlyphOrder([".notdef", "box", "space"])
    characters = [*range(0x20, 0x3100), *map(ord, "中文")]
    made.setupCharacterMap({code: "space" if code in (0x20, 0xA0) else "box" for code in characters})
    box, space = pen.glyph(), TTGlyphPen(None).glyph()
    made.setupGlyf({".notdef": box, "box": box, "space": space})
    made.setupHorizontalMetrics({".notdef": (500, 60), "box": (500, 60), "space": (500, 0)})
    made.setupHorizontalHeader(ascent=900, descent=-250)
    made.setupNameTable({"familyName": "box", "styleName": "Regular"})
    made.setupOS2(sTypoAscender=900, sTypoDescender=-250, usWinAscent=900, usWinDescent=250)
    made.setupPost()
    file = BytesIO()
    made.save(file)
    return b64encode(file.getvalue()).decode()


def write_pages(folder):
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, 6, 96, 16), dtype=np.float32) for _ in "qkv")
    A = ch.AttentionMatrix(1.6 * q, k, causal=True)
    A.save(folder / "map.html", v=v, tokens=[f" w{place % 37}" for place in range(96)])
    ch.explain("humpty dumpty sat on").steps().save(folder / "explain.html")
    ch.explain("mary had a little").save(folder / "why.html")


def taken(running, folder, name, change="0"):
    """The picture of a page, as (pixels, pixels, 3); `change` is a script that runs before."""
    page_name, (width, height), theme = SHOTS[name]
    place = folder / f"{page_name}.html"
    options = {"color_scheme": theme, "reduced_motion": "reduce"}
    with opened(running, place, width, height, "main *", script=IN_BOXES.replace("FONT", boxes()), **options) as page:
        until(page, DRAWN)
        page.evaluate(change)
        page.evaluate("new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go)))")
        page.wait_for_timeout(300)
        picture = Image.open(BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    return np.asarray(picture.reduce(SMALLER))


def farthest(one, other):
    """The largest mean difference of a tile, in levels of 255; infinity where the sizes differ."""
    if one.shape != other.shape:
        return float("inf")
    off = np.abs(one.astype(float) - other)
    high, wide = (-(-size // TILE) for size in off.shape[:2])
    off = np.pad(off, ((0, high * TILE - off.shape[0]), (0, wide * TILE - off.shape[1]), (0, 0)))
    return off.reshape(high, TILE, wide, TILE, 3).mean((1, 3)).max()


def kept(name):
    return np.asarray(Image.open(KEPT / f"{name}.png").convert("RGB"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_pages(folder)
    return folder


@pytest.mark.parametrize("name", SHOTS)
def test_looks_as_it_did(running, pages, tmp_path, name):
    now, before = taken(running, pages, name), kept(name)
    off = farthest(now, before)
    if off > FAR:
        same = now.shape == before.shape
        beside = np.hstack([before, now, 255 - np.abs(before.astype(int) - now).astype(np.uint8)]) if same else now
        Image.fromarray(beside).save(tmp_path / f"{name}.png")
        pytest.fail(
            f"{name} differs by {off:.0f} of 255 in a tile of {SMALLER * TILE} pixels (at most {FAR:.0f}): before, now "
            f"and the difference are in {tmp_path / name}.png. If it is meant: python tests/test_screenshots.py --renew"
        )


def renew():
    """Take all pictures anew."""
    KEPT.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, browser() as running:
        write_pages(Path(folder))
        for name in SHOTS:
            Image.fromarray(taken(running, Path(folder), name)).save(KEPT / f"{name}.png", optimize=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--renew"]:
        renew()
    else:
        print("python tests/test_screenshots.py --renew")
