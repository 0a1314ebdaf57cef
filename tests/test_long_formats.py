"""Long texts in notebooks, pictures, plots and on the command line."""

import html
import json
import re
from base64 import b64decode

import numpy as np
import pytest

import clearhead as ch
from clearhead.cli import main
from clearhead.errors import SelectionError
from clearhead.view import notebook
from long_pages import TOKENS, end_of, matrix, two_layers
from seeds import fresh
from test_page import HOSTILE

small = pytest.fixture(two_layers, scope="module")


def test_a_notebook_shows_pictures_in_place_of_a_large_page(monkeypatch):
    part = matrix(300, heads=6, kv=6, d=64, causal=True)
    monkeypatch.setattr(notebook, "MOST_BYTES", 400_000)
    shown = part._repr_mimebundle_()["text/html"]
    assert len(part.to_html()) > 400_000
    assert "The page with every weight has" in shown
    assert "<iframe" in shown
    assert len(shown) < 500_000
    header = json.loads(re.search(r'id="clearhead">(.*?)</script>', html.unescape(shown))[1])
    assert header["runs"][0]["layers"][0]["exact"] == []


def test_each_picture_has_its_own_caption(small):
    for tokens in (None, TOKENS):
        drawn = small[0].to_svg(1, tokens=tokens)
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
        end = end_of(small[0][0, 1].astype(np.float64))
        assert texts[-3:] == [
            "A, head 1",
            f"0 to {end:.3g} by the square root;",
            f"{end:.3g}: 90th percentile of the rows&#x27; largest weights, row 0 left out",
        ]
    hostile = matrix(len(HOSTILE)).to_svg(tokens=list(HOSTILE))
    assert "<script" not in hostile
    assert "<img" not in hostile


def test_a_notebook_gets_text_a_picture_and_a_frame(small):
    trace = ch.trace(np.eye(2), np.eye(2), np.eye(2))
    for whole, words in ((small[0], "AttentionMatrix("), (trace, "S = Q·Kᵀ")):
        bundle = whole._repr_mimebundle_()
        assert set(bundle) == {"text/plain", "image/svg+xml", "text/html"}
        assert bundle["text/html"].startswith('<iframe sandbox="allow-scripts allow-downloads"')
        assert words in bundle["text/plain"]
    large = ch.AttentionMatrix(np.ones((20000, 2), np.float32), np.ones((20000, 2), np.float32))._repr_mimebundle_()
    assert "save(" in large["text/html"]
    assert "_logsumexp" not in large  # and no weights were computed
    seen = small[0].observe(entropy=True, received=True, top=2)._repr_mimebundle_()
    assert set(seen) == {"text/plain", "image/svg+xml", "text/html"}
    assert "entropy" in seen["text/plain"]
    more = ch.AttentionMatrix(np.ones((64, 2)), np.ones((64, 2)), causal=True)._repr_mimebundle_()
    assert b64decode(more["image/png"]).startswith(b"\x89PNG")
    assert sum(map(len, more.values())) < 300_000
    assert set(ch.AttentionMatrix(np.ones((0, 2)), np.ones((3, 2)))._repr_mimebundle_()) == {"text/plain"}


def test_pictures_and_plots_for_papers(small, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    assert small[0].to_png(1).startswith(b"\x89PNG")
    assert small[0].to_svg(3).startswith("<svg")
    big = ch.AttentionMatrix(fresh().standard_normal((700, 4)), fresh().standard_normal((900, 4)))
    assert "the largest of 11×15 in a pixel" in big.to_svg()
    for shape in ((700, 900), (30, 20)):
        part = ch.AttentionMatrix(fresh().standard_normal((shape[0], 4)), fresh().standard_normal((shape[1], 4)))
        ax = part.plot()
        assert ax.get_xlabel() == "key"
        assert np.isclose(ax.images[0].get_array().max(), part[...].max())
        assert np.isclose(ax.images[0].norm.vmax, end_of(np.asarray(part[...], np.float64)))
        assert "row 0 left out" in ax.figure.axes[1].get_ylabel()
    assert len(small[0].plot().images) == 1
    q = np.ones((5, 2))
    q[3, 0] = np.nan
    cells = ch.AttentionMatrix(q, np.ones((5, 2)), causal=True).plot().images[1].get_array()
    assert (cells[..., 3] > 0).sum() == 4  # the four keys that query 3 sees
    with pytest.raises(SelectionError, match="no head 9"):
        small[0].plot(9)


def test_the_command_line_writes_the_page_of_a_file(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("humpty dumpty sat on a wall", encoding="utf-8")
    place = tmp_path / "page.html"
    assert main(["explain", "--file", str(tmp_path / "book.txt"), "--html", str(place), "--exact", "1.2,0.3"]) == 0
    assert "2 layers, 16 heads, 6 tokens" in capsys.readouterr().out.replace("\n", " ")
    header = json.loads(re.search(r'id="clearhead">(.*?)</script>', place.read_text(encoding="utf-8"))[1])
    assert [layer["exact"] for layer in header["runs"][0]["layers"]] == [[3], [2]]
    assert [x[0] for x in header["facts"]["next"]] == [x.text for x in ch.explain("humpty dumpty sat on a wall").next]
    assert all(said in str(header) for said in ("model rhymes: 2 layers", "最可能的下一个词元"))
    for wrong, words in (
        (["--file", str(tmp_path / "none.txt")], "does not exist"),
        (["text", "--file", str(tmp_path / "book.txt")], "one of them"),
        ([], "one of them"),
        (["text", "--exact", "1.2"], "for the page of a long text"),
        (["--file", str(tmp_path / "book.txt"), "--html", str(place), "--exact", "x"], "expected layer.head"),
    ):
        assert main(["explain", *wrong]) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "bytes.txt").write_bytes(b"ab\xff")
    assert main(["explain", "--file", str(tmp_path / "bytes.txt")]) == 2
    assert "byte 2 is 0xff" in capsys.readouterr().err
