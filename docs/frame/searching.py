"""How Chinese is searched: by pairs of neighbouring characters, in the index and in what a reader types."""

import re

from sphinx.search import SearchLanguage

HAN = "\u3400-\u9fff"
WORD = re.compile(rf"[{HAN}]+|[^\W{HAN}]+")


class Chinese(SearchLanguage):
    """Runs of Chinese characters become pairs; other words stay whole."""

    lang = "zh"
    language_name = "Chinese"
    js_splitter_code = """
function splitQuery(query) {
  const found = [];
  for (const [run] of query.matchAll(/[\\u3400-\\u9fff]+|[\\p{L}\\p{N}_]+/gu)) {
    if (!/[\\u3400-\\u9fff]/.test(run) || run.length === 1) found.push(run);
    else for (let at = 0; at + 1 < run.length; at++) found.push(run.slice(at, at + 2));
  }
  return found;
}
"""

    def split(self, input: str) -> list[str]:  # noqa: A002
        """The words of a text as the index has them."""
        return [part for run in WORD.findall(input) for part in pairs(run)]

    def stem(self, word: str) -> str:
        """Words stay as they are, in small letters."""
        return word.lower()

    def word_filter(self, word: str) -> bool:
        """Every word is worth an entry."""
        return bool(word)


def pairs(run: str) -> list[str]:
    """Neighbouring characters of a Chinese run, with the single ones, which may be words; another word as it is."""
    if not re.match(f"[{HAN}]", run):
        return [run]
    return [run[place : place + 2] for place in range(len(run) - 1)] + list(run)
