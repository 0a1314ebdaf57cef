"""llms.txt and llms-full.txt, for machines that read; and the door that goes to the reader's language."""

import re
from pathlib import Path

from frame.outline import GROUPS, ordered
from frame.staging import title

ABOUT = "Exact attention for Python, fast, whose weights stay visible at any length and can be explained and changed."
ROLE = re.compile(r"\{[\w:]+\}`([^`<]+?) <[^`]*>`")
DOOR = """<!doctype html>
<meta charset="utf-8">
<title>clearhead</title>
<script>location.replace((navigator.language.startsWith("zh") ? "zh" : "en") + "/index.html")</script>
<p><a href="en/index.html">English</a> · <a href="zh/index.html" lang="zh-CN">中文</a></p>
"""


def write(pages: Path, out: Path) -> None:
    """Write all three."""
    known = {path.relative_to(pages).with_suffix("").as_posix() for path in pages.rglob("*.md")}
    short, full = f"# clearhead\n\n> {ABOUT}\n", f"# clearhead\n\n{ABOUT}\n"
    for group in GROUPS:
        some = ordered(group, known)
        if group.en == "Reference":
            some += sorted(page for page in known - set(some) if page.startswith("reference/"))
        short += f"\n## {group.en}\n\n" if some else ""
        for page in some:
            text = (pages / f"{page}.md").read_text(encoding="utf-8")
            short += f"- [{title(pages / f'{page}.md')}](en/{page}.html)\n"
            full += "\n\n" + ROLE.sub(r"`\1`", text)
    (out / "llms.txt").write_text(short, encoding="utf-8")
    (out / "llms-full.txt").write_text(full, encoding="utf-8")
    (out / "index.html").write_text(DOOR, encoding="utf-8")
