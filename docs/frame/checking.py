"""Links, anchors and requests of the built pages, read from disk as a reader without a network has them."""

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "video": "src"}
STYLE = re.compile(r"url\(\s*['\"]?(?!data:)([^'\")]+)|@import\s+['\"]([^'\"]+)")
REMOTE = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)


class _Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        inputs = {name: value or "" for name, value in attrs}
        self.anchors |= {inputs[name] for name in ("id", "name") if name in inputs}
        if tag == "a" and "href" in inputs:
            self.links.append(inputs["href"])
        if tag in LOADED and LOADED[tag] in inputs and inputs.get("rel") not in ("canonical", "next", "prev", "search"):
            self.loaded.append(inputs[LOADED[tag]])


@cache
def read(path: Path) -> _Page:
    """A page's links and anchors."""
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def check(out: Path) -> list[str]:
    """A sentence for each thing that is wrong."""
    wrong = []
    for path in sorted(out.rglob("*.html")):
        here, page = path.relative_to(out), read(path)
        wrong += [f"{here}: loads {address} from a network" for address in page.loaded if REMOTE.match(address)]
        for address in page.links + page.loaded:
            if not re.match(r"[a-z]+:|//", address) and not leads(path, address):
                wrong.append(f"{here}: {address} leads nowhere")
    for path in sorted(out.rglob("*.css")):
        for result in STYLE.findall(path.read_text(encoding="utf-8")):
            address = "".join(result)
            if REMOTE.match(address) or not leads(path, address):
                wrong.append(f"{path.relative_to(out)}: loads {address}")
    return wrong


def leads(path: Path, address: str) -> bool:
    """Is there what an address in a page names?"""
    name, _, anchor = unquote(address).partition("#")
    target = (path.parent / name.partition("?")[0]).resolve() if name else path
    if not target.is_file():
        return False
    made_by_program = target.parent.name == "_figures"  # such a page makes its places when it opens
    return not anchor or target.suffix != ".html" or made_by_program or anchor in read(target).anchors
