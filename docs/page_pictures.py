"""Photograph the pages for the READMEs and docs: python docs/page_pictures.py writes the PNGs. Needs chromium.

Each picture is of a page that a command writes: clearhead explain …, learn … or scale …, as `SHOTS` has it. Those
of the lessons, in both languages, are of the pages that docs/lessons/figures.py writes, and the small ones of the
gallery of the pages that docs/gallery.md makes.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE / "lessons"), str(HERE)]

from figures import FIGURES  # noqa: E402

from browser import browser, opened, until  # noqa: E402
from frame import gallery  # noqa: E402

LAMB = "mary had a little lamb its fleece was white as snow"
RHYMES = HERE.parent / "training/rhymes.txt"


def nothing(_page: Any) -> None:
    """The page as it opens."""


class Shot(NamedTuple):
    """A command, the place in its page's address, the window, the theme, what to do first, and what is photographed."""

    command: list[str]
    place: str = ""
    size: tuple[int, int] = (1240, 800)
    theme: str = "light"
    act: Callable[[Any], None] = nothing
    part: str = ""  # a selector; "": what the window shows, "all": the whole page
    scale: float = 1.5  # pixels of the picture for one of the window


def step(name: str) -> Callable[[Any], None]:
    """Wait for a step's figure."""
    return lambda page: until(page, f"document.querySelector('#step-{name} .figure') !== null")


def drawn(page: Any) -> None:
    """Open what is folded, and wait for the map and the heads' pictures."""
    page.evaluate("for (const each of document.querySelectorAll('details.fold')) each.open = true")
    until(page, "document.querySelector('.map-of').dataset.missing === '0'")
    until(page, "[...document.querySelectorAll('.heads canvas')].every((each) => each.dataset.missing === '0')")


def cut_a_word(page: Any) -> None:
    """Suppose that no query sees the chosen key."""
    drawn(page)
    page.locator("#dive-word").check()
    page.evaluate("(document.querySelector('.fold .rooms') ?? document.body).scrollIntoView()")


def cuts(page: Any) -> None:
    """Show what cutting each edge would change."""
    drawn(page)
    page.locator("select:has(option[value=cuts])").first.select_option("cuts")
    page.locator(".map-of").scroll_into_view_if_needed()


def at_step(page: Any) -> None:
    """Half way through the training."""
    page.locator("input[type=range]").first.fill("20")


def wide(page: Any) -> None:
    """A width at which the softmax saturates."""
    page.locator("input[type=range]").first.fill("6")


def settled(name: str) -> Callable[[Any], None]:
    """What is done before a lesson's figure is photographed."""
    if name in ("scale", "learn"):
        return {"scale": wide, "learn": at_step}[name]
    return cuts if name == "why" else step("scores") if FIGURES[name].place.startswith("#step") else drawn


SHOTS = (
    {
        "answer.png": Shot(["explain", LAMB]),
        "long.png": Shot(
            ["explain", "--file"], "#at=0.1.3&cell=150.140&show=most.sqrt.0.0", (1240, 900), act=drawn, part="all"
        ),
        "page.png": Shot(["explain", "humpty dumpty sat on"], "#step-scores", (1180, 700), act=step("scores")),
        "page-phone.png": Shot(
            ["explain", "humpty dumpty sat on", "--lang", "zh"], "#step-scores", (390, 800), "dark", step("scores")
        ),
        "heads.png": Shot(["explain", LAMB], "#at=0.0.5", theme="dark", act=drawn, part=".front"),
        "what-if.png": Shot(["explain", LAMB], act=cut_a_word),
        "causes.png": Shot(["explain", "mary had a little", "--why"], act=cuts),
        "way.png": Shot(["explain", "humpty dumpty sat on"], "#step-way", part="#step-way"),
        "learn.png": Shot(["learn"], act=at_step, size=(1240, 900)),
        "scale.png": Shot(["scale"], act=wide, size=(1240, 700)),
    }
    | {
        f"{home}lessons/pictures/{name}.png": Shot(
            [*figure.command, "--lang", language], figure.place, (1000, figure.height), act=settled(name), scale=1.0
        )
        for home, language in (("", "en"), ("zh/", "zh"))
        for name, figure in FIGURES.items()
    }
    | {f"gallery/{name}.png": Shot([], size=(1280, 800), scale=0.4) for name in gallery.commands()}
)


def write(shot: Shot, place: Path) -> None:
    """The page that the command writes."""
    command = list(shot.command)
    if command[-1] == "--file":
        text = place.with_suffix(".txt")
        text.write_text("\n".join(RHYMES.read_text(encoding="utf-8").splitlines()[:28]), encoding="utf-8")
        command.append(str(text))
    run = [sys.executable, "-m", "clearhead", *command, "--html", str(place)]
    subprocess.run(run, check=True, capture_output=True)


def main(names: list[str]) -> None:
    """Write the pictures of these names, or every one."""
    with TemporaryDirectory() as folder, browser() as running:
        for name in names or SHOTS:
            shot, page_file = SHOTS[name], Path(folder) / f"{Path(name).stem}.html"
            if shot.command:
                write(shot, page_file)
            else:
                page_file = gallery.kept(page_file.stem, gallery.commands()[page_file.stem])
            options = {"color_scheme": shot.theme, "device_scale_factor": shot.scale, "reduced_motion": "reduce"}
            with opened(running, page_file, *shot.size, wait="h1", place=shot.place, **options) as page:
                page.wait_for_timeout(500)
                shot.act(page)
                page.wait_for_timeout(500)
                if shot.part not in ("", "all"):
                    page.locator(shot.part).screenshot(path=HERE / name)
                else:
                    page.screenshot(path=HERE / name, full_page=shot.part == "all")


if __name__ == "__main__":
    main(sys.argv[1:])
