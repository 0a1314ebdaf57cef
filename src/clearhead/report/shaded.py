"""A text in the terminal, each token shaded by its weight: backgrounds in colour, else a bar above each token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.style import Style
from rich.text import Text

from clearhead.core.axes import Array
from clearhead.digits import percent
from clearhead.models.protocol import Token
from clearhead.report.cells import between, colourful, note, rgb, shade
from clearhead.report.streams import bare, printable, shown, spelled
from clearhead.words import Language, say

BARS = "▁▂▃▄▅▆▇█"
_ASCII = ".:-=+*#@"
_STEPS = len(BARS)
_WEAK, _STRONG = (112, 110, 118), (168, 44, 232)
_INDENT = 2
_MOST_LINES = 24  # of the text; beyond, those with least weight are left out
_CLOSING = ",.;:!?)]}%\"'’”»、。，；：！？）】》」』…"  # stay with what stands before them


@dataclass(frozen=True, slots=True)
class Piece:
    """One token as the reader sees it, or several tokens that are bytes of one character."""

    gap: bool  # is there a space before it?
    text: str
    weight: float  # the sum over its tokens
    masked: bool
    chosen: bool

    @property
    def said(self) -> str:
        return f"[{self.text}]" if self.chosen else self.text

    @property
    def width(self) -> int:
        return cell_len(self.said)


def shaded_text(
    console: Console, text: str, tokens: Sequence[Token], row: tuple[Array, Array, int], language: Language
) -> Iterator[Text]:
    """The text in lines of the console's width, and a legend.

    tokens    of the text, with their places in it
    row       the weights (tokens,), which of them are masked (tokens,), and the index of the token whose row it is,
              which is set in brackets
    """
    pieces = pieces_of(text, tokens, row)
    high = max((piece.weight for piece in pieces if not piece.masked), default=0.0)
    lines = _lines(pieces, console.width - _INDENT)
    weights = [sum(0.0 if piece.masked else piece.weight for piece in line) for line in lines]
    chosen = [any(piece.chosen for piece in line) for line in lines]
    order = sorted(range(len(lines)), key=lambda place: (not chosen[place], -weights[place], place))
    kept = order[:_MOST_LINES]  # all, or the chosen token's and those with the most weight
    for place, line in enumerate(lines):
        if place in kept:
            yield from _drawn(console, line, high)
        elif place == 0 or place - 1 in kept:
            after = next((later for later in range(place, len(lines)) if later in kept), len(lines))
            left = sum(piece.weight for each in lines[place:after] for piece in each if not piece.masked)
            yield note(" " * _INDENT + say(language, "left out", lines=after - place, share=percent(left)))
    if high > 0:
        yield _legend(console, high, language)


def pieces_of(text: str, tokens: Sequence[Token], row: tuple[Array, Array, int]) -> list[Piece]:
    """A text's tokens as they stand in it; tokens that add no characters to the one before them belong to it."""
    weights, masked, chosen = row
    pieces: list[Piece] = []
    reached, apart = 0, False  # where the last token ends, and whether what follows it stands apart
    for place, token in enumerate(tokens):
        marked = float(weights[place]), bool(masked[place]), place == chosen
        if token.start < token.stop <= reached and pieces:
            last = pieces[-1]
            both = last.weight + marked[0], last.masked and marked[1], last.chosen or marked[2]
            pieces[-1] = Piece(last.gap, last.text, *both)
            continue
        if token.start == token.stop:  # a special token, such as [CLS]
            pieces.append(Piece(bool(pieces), bare(token.text), *marked))
            apart = True
            continue
        start = max(token.start, reached)
        skipped, part = text[reached:start], text[start : token.stop]
        leading = part[0] == " " and not part.isspace()
        gap = bool(pieces) and (apart or leading or skipped[-1:].isspace())
        pieces.append(Piece(gap, printable(skipped.strip()) + spelled(part[leading:]), *marked))
        reached, apart = token.stop, part.endswith("\n")
    return pieces


def _lines(pieces: Sequence[Piece], width: int) -> list[list[Piece]]:
    """Lines of at most this width; words stay whole where they fit, and wide characters part anywhere."""
    lines: list[list[Piece]] = [[]]
    used = 0
    for word in _words(pieces):
        whole = sum(piece.width for piece in word)
        parts = [word] if whole <= width // 2 else [[piece] for part in word for piece in _cut(part, width)]
        for part in parts:
            size, space = sum(piece.width for piece in part), int(part[0].gap and used > 0)
            if used and used + space + size > width:
                lines.append([])
                used, space = 0, 0
            lines[-1] += part
            used += space + size
    return lines


def _words(pieces: Sequence[Piece]) -> list[list[Piece]]:
    words: list[list[Piece]] = []
    for piece in pieces:
        last = words[-1][-1].text[-1:] if words else ""
        wide = cell_len(last) > 1 or cell_len(piece.text[:1]) > 1
        if not words or piece.gap or (wide and piece.text[:1] not in _CLOSING):
            words.append([])
        words[-1].append(piece)
    return words


def _cut(piece: Piece, width: int) -> list[Piece]:
    """A piece that is wider than a line, in several."""
    if piece.width <= width:
        return [piece]
    parts = chop_cells(piece.text, max(2, width - 2))  # its brackets take two
    return [replace(piece, text=part, gap=piece.gap and place == 0) for place, part in enumerate(parts)]


def _drawn(console: Console, line: Sequence[Piece], high: float) -> Iterator[Text]:
    """One line of text; without colour, the bars above it."""
    colour = colourful(console)
    text, bars = Text(" " * _INDENT), " " * _INDENT
    for place, piece in enumerate(line):
        space = " " if piece.gap and place else ""
        share = 0.0 if piece.masked else float(shade(np.array([piece.weight]), high)[0])
        step = round(share * _STEPS)  # 0: too little for a mark
        style = Style(dim=True) if piece.masked else _ink(step) if colour and step else Style()
        text.append(space)
        text.append(piece.said, style + Style(bold=True) if piece.chosen else style)
        side = " " if piece.chosen else ""
        bars += space + side + f" {_ramp()}"[step] * cell_len(piece.text) + side
    if not colour and bars.strip():
        yield Text(bars.rstrip())
    yield text


def _legend(console: Console, high: float, language: Language) -> Text:
    """The weights of the first and the last mark, and all marks between them."""
    ramp = _ramp()
    said = say(language, "legend marks", low=high * (0.5 / _STEPS) ** 2, high=high, ramp=ramp)
    before, after = said.split(ramp)
    line = note(before)
    for step, mark in enumerate(ramp, 1):
        line.append(" " if colourful(console) else mark, _ink(step) if colourful(console) else None)
    return line.append(after)


def _ink(step: int) -> Style:
    """A background from grey to violet: as dark as each other, so that it shows on black and on white terminals."""
    return Style(color=rgb((255, 255, 255)), bgcolor=rgb(between(_WEAK, _STRONG, (step - 1) / (_STEPS - 1))))


def _ramp() -> str:
    """Eighths of a block, or characters of ASCII where the output's encoding lacks them."""
    return BARS if shown(BARS) == BARS else _ASCII
