"""The order of the pages: groups of names below docs/, without .md. A page in no group is an error."""

from typing import NamedTuple

LANGUAGES = ("en", "zh")


class Group(NamedTuple):
    """A heading of the sidebar in both languages, and the pages below it; a name that ends with /* is a folder."""

    en: str
    zh: str
    pages: tuple[str, ...]


GROUPS = (
    Group("Start", "入门", ("paris", "getting-started", "gallery", "install", "models")),
    Group("Lessons", "课程", ("lessons/index", "lessons/*")),
    Group(
        "Guides",
        "指南",
        (
            "guides/long-prompt",
            "guides/port",
            "diagnose",
            "testing",
            "guides/training",
            "transformers",
            "pytorch",
            "serving",
            "guides/long-text",
            "guides/experiments",
            "guides/eviction",
            "guides/machines",
            "guides/adding",
        ),
    ),
    Group(
        "Concepts",
        "概念",
        ("looking", "matrix", "causes", "change", "spans", "derivatives", "textbook", "scale"),
    ),
    Group(
        "Reference",
        "参考",
        (
            "reference/python",
            "reference/rules",
            "reference/statistics",
            "reference/commands",
            "files",
            "reference/errors",
        ),
    ),
    Group("How it compares", "对比", ("comparison", "methods", "performance")),
    Group("How it is built", "内部构造", ("architecture", "page-format", "contributing", "security")),
    Group("Log", "记录", ("changelog", "log")),
)


def ordered(group: Group, pages: set[str]) -> list[str]:
    """The pages of a group that there are, in its order; those of a folder by name."""
    results: list[str] = []
    for name in group.pages:
        folder = name.removesuffix("*")
        some = sorted(page for page in pages if page.startswith(folder)) if name.endswith("/*") else [name]
        results += [page for page in some if page in pages and page not in results]
    return results
