"""Photograph the explaining page for the README: python docs/page_pictures.py writes the PNGs. Needs chromium."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from browser import browser, opened, until  # noqa: E402
from clearhead.explain import explain  # noqa: E402
from clearhead.model import load  # noqa: E402

TEXT = "humpty dumpty sat on"
SHOTS = {  # name: language, width, height, theme, the step it shows
    "page.png": ("en", 1180, 700, "light", "scores"),
    "page-phone.png": ("zh", 390, 800, "dark", "scores"),
}


def main() -> None:
    """Write every picture."""
    seen = explain(load(), TEXT)
    with TemporaryDirectory() as folder, browser() as running:
        for name, (language, width, height, theme, step) in SHOTS.items():
            path = Path(folder) / f"{name}.html"
            seen.save(path, language)
            options = {"color_scheme": theme, "device_scale_factor": 1.5, "reduced_motion": "reduce"}
            with opened(running, path, width, height, **options) as (page, _):
                for _ in range(3):  # what is drawn on the way moves what lies below
                    page.evaluate(f"document.getElementById('step-{step}').scrollIntoView()")
                    page.wait_for_timeout(300)
                until(page, f"document.querySelector('#step-{step} .figure') !== null")
                page.screenshot(path=HERE / name)


if __name__ == "__main__":
    main()
