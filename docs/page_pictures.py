"""Photograph the pages for the READMEs and docs: python docs/page_pictures.py writes the PNGs. Needs chromium."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from browser import browser, opened, until  # noqa: E402
from clearhead.explaining.every_layer import seen_in  # noqa: E402
from clearhead.explaining.explain import explain  # noqa: E402
from clearhead.explaining.gpt2 import load  # noqa: E402
from clearhead.view.long import PageOptions, document  # noqa: E402
from clearhead.view.page import encoded  # noqa: E402

TEXT = "humpty dumpty sat on"
SHOTS = {  # name: language, width, height, theme, the step it shows
    "page.png": ("en", 1180, 700, "light", "scores"),
    "page-phone.png": ("zh", 390, 800, "dark", "scores"),
}

LONG = "#at=0.1.3&cell=150.140&show=most.sqrt.0.0"


def main() -> None:
    """Write every picture."""
    seen = explain(TEXT, load())
    with TemporaryDirectory() as folder, browser() as running:
        for name, (language, width, height, theme, step) in SHOTS.items():
            path = Path(folder) / f"{name}.html"
            seen.save(path, language)
            options = {"color_scheme": theme, "device_scale_factor": 1.5, "reduced_motion": "reduce"}
            with opened(running, path, width, height, place=f"#step-{step}", **options) as (page, _):
                until(page, f"document.querySelector('#step-{step} .figure') !== null")
                page.wait_for_timeout(300)
                page.screenshot(path=HERE / name)
        path = Path(folder) / "long.html"
        lines = (HERE.parent / "training/rhymes.txt").read_text(encoding="utf-8").splitlines()
        run = seen_in(load(), "\n".join(lines[:28]))
        path.write_bytes(encoded(document([run], PageOptions(title="nursery rhymes"))))
        options = {"color_scheme": "light", "device_scale_factor": 1.5, "wait": ".map-of", "place": LONG}
        with opened(running, path, 1240, 900, **options) as (page, _):
            until(page, "document.querySelector('.map-of').dataset.missing === '0'")
            page.wait_for_timeout(500)
            page.screenshot(path=HERE / "long.png", full_page=True)
        seen = explain("mary had a little lamb its fleece was white as snow", load())
        seen.save(path)
        options = {"color_scheme": "light", "device_scale_factor": 1.5, "wait": ".map-of"}
        with opened(running, path, 1240, 900, **options) as (page, _):
            until(page, "[...document.querySelectorAll('.heads canvas')].every((each) => each.width > 1)")
            page.screenshot(path=HERE / "answer.png")


if __name__ == "__main__":
    main()
