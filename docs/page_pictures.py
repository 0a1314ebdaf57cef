"""Photograph the pages for the READMEs and docs: python docs/page_pictures.py writes the PNGs. Needs chromium.

Each is of a page that a command writes, as `SHOTS` has it. Those of the lessons are in both languages.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from browser import browser, opened, until  # noqa: E402

LAMB = "mary had a little lamb its fleece was white as snow"
RHYMES, EXERCISES = HERE.parent / "training/rhymes.txt", HERE / "lessons/exercises"


class Shot(NamedTuple):
    """A command, the place in its page's address, the window, the theme, what to do first, and what is photographed."""

    command: list[str]
    place: str = ""
    size: tuple[int, int] = (1240, 800)
    theme: str = "light"
    act: Callable[[Any], None] = lambda _page: None
    part: str = ""  # a selector; "": what the window shows
    scale: float = 1.5  # pixels of the picture for one of the window


def scores(page: Any) -> None:
    """Wait for the figure of the scores."""
    until(page, "document.querySelector('#step-scores .figure') !== null")


def drawn(page: Any) -> None:
    """Open what is folded, and wait for the map and the heads' pictures."""
    page.evaluate("for (const each of document.querySelectorAll('details.fold')) each.open = true")
    until(page, "document.querySelector('.map-of').dataset.missing === '0'")
    until(page, "[...document.querySelectorAll('.heads canvas')].every((each) => each.dataset.missing === '0')")


def hide_a_word(page: Any) -> None:
    """Hide a word from all others, and drop the scale."""
    until(page, "document.querySelector('.try').getAttribute('aria-busy') === 'false'")
    page.locator(".try summary").click()
    page.locator(".passage .token").nth(4).dblclick()
    page.locator("#try-scale").select_option("none")
    until(page, "document.querySelector('.stale') !== null")
    until(page, "document.querySelector('.stale') === null")  # what made the new answer is there
    drawn(page)


def cut(page: Any) -> None:
    """Wait for what made the answer of the run without the edge that the address cuts."""
    until(page, "document.querySelector('.try').getAttribute('aria-busy') === 'false'")
    until(page, "document.querySelector('.carried') !== null && document.querySelector('.stale') === null")
    drawn(page)


def slid(place: int) -> Callable[[Any], None]:
    """Move the first slider, through the training."""
    return lambda page: page.locator("input[type=range]").first.fill(str(place))


ONE = ["--layer", "0", "--head", "7"]
LESSONS: dict[str, tuple[list[str], str, int, Callable[[Any], None]]] = {  # a command, a place, a height, what to do
    "one-head": (["trace", str(EXERCISES / "one-head.json")], "#step-scores", 640, scores),
    "cross": (["trace", str(EXERCISES / "2-cross.json")], "#step-scores", 640, scores),
    "humpty": (["explain", "humpty dumpty sat on", *ONE], "", 800, drawn),
    "heads": (["explain", "humpty dumpty sat on a", *ONE], "", 800, drawn),
    "generate": (["explain", "humpty dumpty", "--generate", "6", "--token", "7"], "", 800, drawn),
    "learn": (["learn"], "", 800, slid(20)),
    "why": (["explain", "mary had a little", "--why"], "#at=0.0.2&cell=3.0&cuts=0.2.3.0", 800, cut),
}
HUMPTY, AT_LONG = ["explain", "humpty dumpty sat on"], "#at=0.1.3&cell=93.39"
SHOTS = {
    "answer.png": Shot(["explain", LAMB]),
    "long.png": Shot(["explain", "--layer", "1", "--head", "3", "--file"], AT_LONG, (1240, 1500), act=drawn),
    "page.png": Shot(HUMPTY, "#step-scores", (1180, 700), act=scores),
    "page-phone.png": Shot([*HUMPTY, "--lang", "zh"], "#step-scores", (390, 800), "dark", scores),
    "changed.png": Shot(["explain", LAMB], act=hide_a_word),
    "way.png": Shot(HUMPTY, "#step-way", part="#step-way"),
    "paris.png": Shot(["explain", "The capital of France is", "--model", "smollm2"], size=(1280, 800), scale=0.4),
} | {
    f"{home}lessons/pictures/{name}.png": Shot(
        [*command, "--lang", language], place, (1000, height), act=act, scale=1.0
    )
    for home, language in (("", "en"), ("zh/", "zh"))
    for name, (command, place, height, act) in LESSONS.items()
}


def write(shot: Shot, place: Path) -> None:
    """The page that the command writes."""
    command = list(shot.command)
    if command[-1] == "--file":
        text = place.with_suffix(".txt")
        text.write_text("\n".join(RHYMES.read_text(encoding="utf-8").splitlines()[:16]), encoding="utf-8")
        command.append(str(text))
    run = [sys.executable, "-m", "clearhead", *command, "--html", str(place)]
    subprocess.run(run, check=True, capture_output=True)


def main(names: list[str]) -> None:
    """Write the pictures of these names, or every one."""
    with TemporaryDirectory() as folder, browser() as running:
        for name in names or SHOTS:
            shot, page_file = SHOTS[name], Path(folder) / f"{Path(name).stem}.html"
            write(shot, page_file)
            options = {"color_scheme": shot.theme, "device_scale_factor": shot.scale, "reduced_motion": "reduce"}
            with opened(running, page_file, *shot.size, wait="h1", place=shot.place, **options) as page:
                page.wait_for_timeout(500)
                shot.act(page)
                page.wait_for_timeout(500)
                (page.locator(shot.part) if shot.part else page).screenshot(path=HERE / name)


if __name__ == "__main__":
    main(sys.argv[1:])
