"""What a page computes, against the reference, its modules run in node; and the values that its file may bring."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from browser import opened, until
from clearhead.core.arrays import bfloat16
from clearhead.digits import percent
from clearhead.errors import DtypeError, RuleError, ShapeError
from clearhead.view import container, long, page
from page_files import header_of
from seeds import fresh
from test_rooms import results, settled, vector

CHECK = Path(__file__).parents[1] / "page/check"
B, H, KV, N, M, D, DV = 2, 4, 2, 5, 7, 3, 6
RNG = np.random.default_rng(11)
ALLOWED = RNG.random((B, 1, N, M)) < 0.6
ALLOWED[0, 0, 2] = False  # a query that sees nothing
LABELS = RNG.integers(-1, 3, (B, N)), RNG.integers(-1, 4, (B, M))
RULES = {
    "none": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "causal": {"causal": True, "query_offset": 0},
    "offsets": {"causal": True, "query_offset": np.array([2, -3])},
    "window": {"window": (2, 1), "query_offset": 1},
    "bias": {"bias": RNG.standard_normal((H, 1, M))},
    "forbidding bias": {"bias": np.where(ALLOWED, 0.5, -np.inf)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0])},
    "mask": {"mask": ALLOWED},
    "lengths": {"kv_lengths": np.array([4, 7]), "query_lengths": np.array([5, 0])},
    "segments": {"query_segments": RNG.integers(0, 2, (B, N)), "kv_segments": RNG.integers(0, 2, (B, M))},
    "a scale for each head": {"scale": np.array([0.3, -0.5, 0.0, 2.0])},
    "spans": {"spans": (*LABELS, np.where(RNG.random((3, 4)) < 0.2, -np.inf, RNG.standard_normal((B, H, 3, 4))))},
    "spans and a bias": {"spans": (LABELS[0][0], LABELS[1], RNG.standard_normal((3, 4))), "bias": RNG.random((N, M))},
    "sinks": {"sinks": np.array([0.5, -np.inf, 2.0, 0.0])},
    "all": {"scale": 0.7, "softcap": 3.0, "bias": RNG.standard_normal((N, M)), "window": (3, None), "causal": True}
    | {"query_offset": 2, "mask": ALLOWED, "alibi_slopes": np.ones(H) * 0.1, "kv_lengths": np.array([6, 5])},
}


def in_node(script, *arguments):
    """What one of the page's programs prints."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    done = subprocess.run(["node", script, *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def in_the_page(trace, tmp_path):
    trace.save(tmp_path / "page.html")
    heads = in_node(CHECK / "head.js", tmp_path / "page.html", "steps")
    return {name: np.array([[[float(x) for x in row] for row in head[name]] for head in heads]) for name in heads[0]}


def flat(array):
    return np.asarray(array, dtype=np.float64).reshape(-1, *np.shape(array)[-2:])


CASES = [(rule, np.float32) for rule in RULES]
CASES += [(rule, dtype) for rule in ("none", "all") for dtype in (np.float64, np.float16, bfloat16)]


@pytest.mark.parametrize(("rule", "dtype"), CASES, ids=str)
def test_the_page_computes_what_the_reference_computes(rule, dtype, tmp_path):
    rng = np.random.default_rng(5)
    shapes = (B, H, N, D), (B, KV, M, D), (B, KV, M, DV)
    trace = ch.trace(*(rng.standard_normal(shape).astype(dtype) for shape in shapes), **RULES[rule])
    page = in_the_page(trace, tmp_path)
    for name in ("scores", "masked", "weights", "output"):
        np.testing.assert_allclose(page[name], flat(getattr(trace, name)), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(page["tile"], flat(trace.weights), rtol=1e-6, atol=1e-30)  # float32, rounded once


def test_the_page_prints_shares_as_the_terminal_does():
    shares = [0.0, 1.0, 0.1, 0.001, 0.00001, *(10.0 ** -(14 * fresh().random(2000))).tolist()]
    assert in_node(CHECK / "numbers.js", json.dumps({"percent": shares}))["percent"] == [
        percent(share) for share in shares
    ]


# values


def problem(rng, n, m, dtype=np.float32, lead=(2,)):
    shapes = (*lead, H, n, D), (*lead, KV, m, D), (*lead, KV, m, DV)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def layer_of(place):
    """The first layer of a page's first run, and its arrays' entries."""
    header = header_of(Path(place).read_text(encoding="utf-8"))
    layer = header["runs"][0]["layers"][0]
    return layer, {name: header["arrays"][where] for name, where in layer["arrays"].items()}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, bfloat16], ids=str)
@pytest.mark.parametrize("room", [1e6, 1], ids=["as it is", "rounded"])
def test_a_saved_weights_arithmetic_ends_at_the_output(dtype, room, tmp_path):
    rng = fresh()
    n, m = int(rng.integers(1, 40)), int(rng.integers(1, 40))
    q, k, v = problem(rng, n, m, dtype)
    rules = {"mask": rng.random((n, m)) < 0.7, "softcap": 4.0, "sinks": rng.standard_normal(H)}
    batch = int(rng.integers(2))
    place = tmp_path / "page.html"
    run = ch.AttentionMatrix(q, k, **rules).__shown__(batch, v)
    page.write(place, lambda: long.document([run], room=room))
    cells = [[int(rng.integers(H if room > 1 else 1)), int(rng.integers(n)), int(rng.integers(m))] for _ in range(20)]
    truth = ch.trace(q, k, v, **rules)
    for (head, i, j), result in zip(cells, in_node(CHECK / "head.js", place, "cells", json.dumps(cells)), strict=True):
        if not rules["mask"][i].any():
            continue
        weight = truth.weights[batch, head, i, j]
        value = v[batch, head // (H // KV), j].astype(np.float64)
        assert abs(result["weight"] - weight) <= weight * result["bound"]
        assert (np.abs(result["value"] - value) <= np.abs(value) * result["lost"] + 1e-7).all()
        near = np.array(result["off"]) * (1 + result["bound"]) + 1e-7
        assert (np.abs(result["output"] - truth.output[batch, head, i]) <= near).all()


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">u4", ">i2", "<f4", "?"])
def test_a_page_holds_numbers_of_any_byte_order(dtype):
    x = (np.arange(6) % 2 + np.arange(6)).reshape(2, 3).T.astype(dtype)
    held = container.stored(x)
    assert held.flags.c_contiguous
    assert held.dtype in (np.float64, np.float32, np.uint32, np.int32, np.uint8)
    np.testing.assert_array_equal(np.frombuffer(held.tobytes(), held.dtype.newbyteorder("<")).reshape(3, 2), x)


def test_v_is_checked_before_a_file_is_written(tmp_path):
    q, k, v = problem(fresh(), 3, 4)
    matrix = ch.AttentionMatrix(q, k)
    for wrong, error, words in (
        (v[:, :, :3], ShapeError, r"v has shape \(2, 2, 3, 6\): expected \(2, 2, 4, d\)"),
        (np.repeat(v, 2, 1), ShapeError, "v has shape"),
        (v.astype(np.int64), DtypeError, "v is int64"),
        ([1, 2], DtypeError, "v is a list"),
    ):
        with pytest.raises(error, match=words):
            matrix.save(tmp_path / "page.html", v=wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_watched_runs_page_has_its_values_and_effects(tmp_path):
    torch = pytest.importorskip("torch")
    from watched import build

    model, ids = build("gpt2"), torch.arange(9)[None]
    with ch.watch(model, causes=True) as caused:
        model(torch.cat([ids, ids + 9])).logits[:, -1, 3].sum().backward()
    made = caused.document(batch=1)
    for place, layer in enumerate(made.header["runs"][0]["layers"]):
        np.testing.assert_array_equal(made.arrays[layer["arrays"]["v"]], caused.layer(place).v[1].detach().numpy())
        effects = np.asarray(caused.contributions(place))[1].sum((1, 2))
        np.testing.assert_allclose(layer["statistics"]["effect"], effects, rtol=1e-3, atol=1e-5)
    with ch.watch(model, causes=True) as unseen:  # and no backward pass
        model(ids)
    assert "effect" not in unseen.document().header["runs"][0]["layers"][0]["statistics"]
    with torch.no_grad(), ch.watch(model) as seen:
        model(ids)
    seen.save(tmp_path / "page.html")
    layer, arrays = layer_of(tmp_path / "page.html")
    assert (layer["values"], "v" in arrays) == ("float32", True)
    with pytest.raises(RuleError, match="v was given, but a watched run has its own v"):
        seen.save(tmp_path / "page.html", v=np.ones((1, 4, 9, 8)))
    cells = [[2, 8, 3]]
    (result,) = in_node(CHECK / "head.js", tmp_path / "page.html", "cells", json.dumps(cells))
    kept = seen.layer(0)
    truth = ch.trace(*(x.double() for x in (kept.q, kept.k, kept.v)), causal=True)
    assert result["output"] == pytest.approx(np.asarray(truth.output)[0, 2, 8].tolist(), rel=1e-4, abs=1e-6)
    assert result["value"] == pytest.approx(kept.v[0, 2, 3].tolist())


def test_a_page_writes_the_output_or_says_how_to_get_the_values(running):
    rng = fresh()
    q, k, v = (x[0] for x in problem(rng, 6, 6, np.float64))
    matrix = ch.AttentionMatrix(q, k, causal=True)
    truth = ch.trace(q, k, v, causal=True)
    layer = long.ShownLayer("", range(H), matrix.part(0), v=v[None])
    with opened(running, matrix.to_html(v=v), wait=".map-of", place="#at=0.0.3&cell=5.2") as tab:
        settled(tab)
        result = results(tab)
        assert vector(result["output: the sum over all keys"]) == pytest.approx(
            truth.output[3, 5, :4], rel=6e-3, abs=1e-4
        )
    without = {
        "This page has no values (v)": matrix.to_html(),
        "save(…, v=v) adds them": matrix.to_html(),
        "This head is stored as an image": long.document([long.ShownRun("", [layer])], room=1),
    }
    for words, made in without.items():
        with opened(running, made, wait=".map-of", place="#at=0.0.3") as tab:
            until(tab, f"document.querySelector('main').textContent.includes('{words}')")
