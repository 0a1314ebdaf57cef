"""Sphinx's settings; docs/site.py starts it, once for each language."""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import clearhead  # noqa: E402
from frame.searching import Chinese  # noqa: E402

project = "clearhead"
author = "clearhead contributors"
copyright = "clearhead contributors; Apache License 2.0"  # noqa: A001
version = release = clearhead.__version__
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
smartquotes = False  # --json is no dash
nitpick_ignore_regex = [(r"py:.*", r"(?!clearhead\.).*")]  # other libraries' names lead nowhere without a network
maximum_signature_line_length = 240  # longer ones get a line for each parameter
add_module_names = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
suppress_warnings = ["misc.highlighting_failure"]
html_theme = "furo"
html_title = "clearhead"
html_static_path = [str(HERE / "static")]
html_css_files = ["clearhead.css"]
html_js_files = [("clearhead.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False
html_show_sourcelink = False
templates_path = [str(HERE / "templates")]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}


def other_language(app: Any, pagename: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Tell the template where the same page is in the other language, if it is there."""
    here = Path(app.srcdir)
    other = "zh" if here.name == "en" else "en"
    up = "../" * (pagename.count("/") + 1)
    context["other_language"] = None
    if pagename in ("search", "genindex", "py-modindex") or (here.parent / other / f"{pagename}.md").exists():
        context["other_language"] = f"{up}{other}/{pagename}.html"


def setup(app: Any) -> None:
    """What belongs to one language, and the switch between both."""
    app.connect("config-inited", lambda app, config: setattr(config, "html_extra_path", [_extra(app)]))
    app.connect("html-page-context", other_language)
    app.add_search_language(Chinese)


def _extra(app: Any) -> str:
    folder = Path(app.srcdir).parent / "extra" / Path(app.srcdir).name
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)
