"""`clearhead view` serves the page to this machine only; bad requests get a reason and do not stop the server."""

import base64
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import clearhead as ch
from browser import listened, number, until
from clearhead.core.arrays import bfloat16
from clearhead.view import answers, long
from clearhead.view.pooling import tile
from seeds import fresh
from terminal import refused
from test_page_values import CHECK, DV, KV, RULES, B, D, H, in_node
from test_page_values import M as KEYS
from test_page_values import N as QUERIES
from test_rooms import results, vector

server = pytest.importorskip("clearhead.view.server")
uvicorn = pytest.importorskip("uvicorn")
TOKEN = "a-token"
N, M = 20, 24


@pytest.fixture(scope="module")
def matrix():
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 4, N, 6)), rng.standard_normal((2, 2, M, 6))
    return ch.AttentionMatrix(q, k, causal=True, query_offset=M - N)


@pytest.fixture(scope="module")
def values():
    return np.random.default_rng(4).standard_normal((2, 2, M, 5))


@contextmanager
def served(matrix, v, g=None):
    """Batch item 1 of a matrix, served: its port, and what ends the server."""
    arrays = {name: None if x is None else x[1:] for name, x in (("v", v), ("g", g))}
    layer = long.ShownLayer("0", range(4), matrix.part(1), **arrays)
    run = long.ShownRun("run", [layer], [f" w{place}" for place in range(M)])
    document = long.document([run], title="served", served=True)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(server.application(document, [run], TOKEN), log_level="error", lifespan="off")
    serving = uvicorn.Server(config)
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]})
    thread.start()

    def end():
        serving.should_exit = True
        thread.join()
        listening.close()

    try:
        yield listening.getsockname()[1], end
    finally:
        end()


@pytest.fixture(scope="module")
def port(matrix, values):
    with served(matrix, values) as (result, _):
        yield result


@contextmanager
def visited(running, port, strict=True):
    """A cell of the served page in a browser; strictly, the page may write nothing to the console."""
    unwanted = []
    page = listened(running.new_context(viewport={"width": 1280, "height": 900}).new_page(), unwanted)
    page.goto(f"http://127.0.0.1:{port}/{TOKEN}/#at=0.0.2&cell=15.6")
    page.wait_for_selector(".map-of")
    yield page
    assert unwanted == [] or not strict


def asked(port, path, body=None, method=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    data = json.dumps(body) if isinstance(body, dict) else body
    connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
    answer = connection.getresponse()
    result = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return result


HEAD = {"run": 0, "layer": 0, "head": 2}


def test_served_rows_columns_and_tiles_equal_the_matrix(port, matrix):
    weights = matrix[1, 2]
    status, row, _ = asked(port, f"/{TOKEN}/row", {**HEAD, "at": 7})
    assert status == 200
    assert np.allclose(np.maximum(np.frombuffer(row, "<f4"), 0), weights[7], atol=1e-6)
    assert (np.frombuffer(row, "<f4")[7 + M - N + 1 :] == -1).all()
    _, column, _ = asked(port, f"/{TOKEN}/column", {**HEAD, "at": 7})
    assert np.allclose(np.maximum(np.frombuffer(column, "<f4"), 0), weights[:, 7], atol=1e-6)
    wish = {"rows": [0, 3, 4, 9], "cols": [2, 5, 6, 11, 12], "step": 2, "rule": "mean"}
    _, result, _ = asked(port, f"/{TOKEN}/tile", {**HEAD, **wish})
    expected = tile(matrix.part(1), 2, wish["rows"], wish["cols"], 2, "mean")
    assert np.array_equal(np.frombuffer(result, "<f4").reshape(2, 2), expected)


GOOD = {**HEAD, "rows": [0, 1, 2], "cols": [0, 1], "step": 1, "rule": "most"}
WEIGHT = {**HEAD, "query": 7, "key": 2}
BAD = {  # by what is asked: changes of a good question, and what is said
    "tile": (
        ({"head": 4}, "head is 4: expected a whole number from 0 to 3"),
        ({"layer": "x"}, "layer is 'x'"),
        ({"rows": [0]}, "rows: expected 2 to 2049"),
        ({"rows": [0, 0]}, "rows: expected rising"),
        ({"cols": list(range(3000))}, "cols: expected 2 to 2049"),
        ({"rule": "sum"}, "rule is 'sum'"),
    ),
    "operands": (
        ({"query": N}, f"query is {N}: expected a whole number from 0 to {N - 1}"),
        ({"key": M}, f"key is {M}: expected a whole number from 0 to {M - 1}"),
    ),
}


@pytest.mark.parametrize(("what", "good"), [("tile", GOOD), ("operands", WEIGHT)])
def test_a_bad_request_gets_a_reason_and_ends_no_server(port, what, good):
    for changes, words in BAD[what]:
        status, said, _ = asked(port, f"/{TOKEN}/{what}", {**good, **changes})
        assert (status, words in said.decode()) == (400, True), (changes, said)
        assert asked(port, f"/{TOKEN}/{what}", good)[0] == 200


def test_many_requests_at_once_are_all_answered(port):
    result = []
    flood = [
        threading.Thread(target=lambda: result.append(asked(port, f"/{TOKEN}/operands", WEIGHT))) for _ in range(40)
    ]
    for each in flood:
        each.start()
    for each in flood:
        each.join()
    assert {status for status, *_ in result} == {200}
    assert len({data for _, data, _ in result}) == 1


def arithmetic(problems, tmp_path):
    """What the page's program makes of the server's answers for one cell of each problem."""
    cells = []
    for run, words, head, i, j in problems:
        place = {"run": 0, "layer": 0, "head": head}
        answer = answers.answer("operands", place | {"query": i, "key": j}, [run])
        cells.append({"layer": words, "i": i, "j": j, "answer": base64.b64encode(answer).decode()})
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    return in_node(CHECK / "operands.js", str(tmp_path / "cells.json"))


@pytest.mark.parametrize("most", [2**22, 0], ids=["whole heads", "single cells"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, bfloat16], ids=str)
def test_a_served_weights_arithmetic_is_the_references(most, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "_MOST_NUMBERS", most)
    rng, problems, truth = fresh(), [], []
    for rules in RULES.values():
        shapes = (B, H, QUERIES, D), (B, KV, KEYS, D), (B, KV, KEYS, DV)
        q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        batch, head, i, j = (int(rng.integers(size)) for size in (B, H, QUERIES, KEYS))
        part = ch.AttentionMatrix(q, k, **rules).part(batch)
        run = long.ShownRun("run", [long.ShownLayer("0", range(H), part, v=v[[batch]])])
        document = long.document([run], served=True)
        problems.append((run, document.header["runs"][0]["layers"][0], head, i, j))
        truth.append((ch.trace(q, k, v, **rules), v[batch, head // (H // KV), j], (batch, head, i), j))
    for result, (trace, value, row, j) in zip(arithmetic(problems, tmp_path), truth, strict=True):
        number = {name: np.array(result[name], np.float64) for name in result if name != "whole"}
        weight = trace.weights[row][j]
        bound = number["bound"] if np.isfinite(trace.logsumexp[row]) else 0.0
        assert result["whole"] == (most > 0)
        assert number["score"] == pytest.approx(trace.scores[row][j], rel=1e-12)
        assert number["logit"] == pytest.approx(trace.masked[row][j], rel=1e-6)
        assert number["logsumexp"] == pytest.approx(trace.logsumexp[row], rel=1e-5, abs=1e-6)
        assert abs(number["weight"] - weight) <= weight * bound
        assert bound < 1e-4
        assert number["seen"] == np.isfinite(trace.masked[row]).sum()
        assert np.array_equal(number["value"], value.astype(np.float64))
        near = np.nan_to_num(number["off"]) + 1e-14
        assert (np.abs(number["output"] - trace.output[row]) <= near).all()


def test_requests_from_other_machines_and_pages_are_refused(port):
    assert asked(port, f"/{TOKEN}/")[0] == 200
    assert asked(port, "/other/")[0] == 404
    assert asked(port, "/")[0] == 404
    assert asked(port, f"/{TOKEN}/nothing", GOOD)[0] == 404
    assert asked(port, f"/{TOKEN}/tile")[0] == 405
    assert asked(port, f"/{TOKEN}/tile", "no json")[0] == 400
    assert asked(port, f"/{TOKEN}/tile", "[" * 100_000)[0] == 400
    assert asked(port, f"/{TOKEN}/", Host="evil.example")[0] == 400
    assert asked(port, f"/{TOKEN}/", Origin="http://evil.example")[0] == 403
    assert asked(port, f"/{TOKEN}/tile", GOOD, Origin="null")[0] == 403
    assert asked(port, f"/{TOKEN}/tile", GOOD, Origin=f"http://127.0.0.1:{port}")[0] == 200
    _, _, headers = asked(port, f"/{TOKEN}/")
    policy = {name.lower(): value for name, value in headers.items()}["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self'" in policy
    assert policy.endswith("frame-ancestors 'none'")


@pytest.mark.parametrize("whole", [True, False])
def test_a_served_weight_is_written_out_to_the_output(running, port, matrix, values, whole, monkeypatch):
    monkeypatch.setattr(answers, "_MOST_NUMBERS", 2**22 if whole else 0)
    weights = matrix[1, 2]
    with visited(running, port) as page:
        for i, j in ((15, 6), (14, 6), (14, 7)):
            until(page, f"document.querySelector('.dive .says')?.textContent.startsWith('Query {i} and key {j}:')")
            result, output = results(page), (weights[i] @ values[1, 1])[:4]
            assert float(result["softmax"]) == pytest.approx(weights[i, j], rel=1e-3)
            assert vector(result["weight times value"]) == pytest.approx(weights[i, j] * values[1, 1, j, :4], rel=6e-3)
            assert vector(result["output: the sum over all keys"]) == pytest.approx(output, rel=6e-3)
            page.locator(".map-of").focus()
            page.keyboard.press("ArrowUp" if i == 15 else "ArrowRight")
        assert page.locator("#dive-temperature").is_visible() == whole
        assert page.locator(".row-bars").is_visible()
        page.keyboard.press("]")
        until(page, "document.querySelector('#head').textContent.endsWith('head 3')")
        until(page, "document.querySelector('.dive .says').textContent.startsWith('Query 14 and key 8:')")
        for _ in range(100):  # the sentence of the other head may still stand there, with its numbers or without
            written = float(results(page).get("softmax", "nan"))
            if written == pytest.approx(matrix[1, 3, 14, 8], rel=1e-3):
                break
            page.wait_for_timeout(50)
        assert written == pytest.approx(matrix[1, 3, 14, 8], rel=1e-3)
        if whole:
            page.check("#dive-edge")
            assert "masked" in results(page)["mask"]
            page.locator(".controls .display > summary").click()
            page.check("#words")
            page.wait_for_timeout(300)
            until(page, "document.querySelector('.map-of').dataset.missing === '0'")


def test_a_served_run_with_derivatives_shows_what_its_edges_did(running, matrix, values):
    g = fresh().standard_normal((2, 4, N, 5))
    with served(matrix, values, g) as (port, _), visited(running, port) as page:
        for head, kind, effects in ((2, "contribution", matrix.contributions), (3, "cut", matrix.cut_effects)):
            until(page, f"document.querySelector('#readout').textContent.includes('{kind}')")
            said = page.locator("#readout").text_content()
            i, j = map(int, re.findall(r"(?:query|key) (\d+)", said)[:2])
            value = number(re.search(rf"{kind} (\S+)", said)[1])
            assert value == pytest.approx(effects(values, g)[1, head, i, j], rel=6e-3, abs=1e-6)
            if head == 2:
                page.locator("#shows").select_option("cuts")
                page.locator(".map-of").focus()
                page.keyboard.press("]")
                until(page, "document.querySelector('#head').textContent.endsWith('head 3')")
        assert "ch.explain(" in page.locator(".answer p.note").text_content()


def test_a_page_says_when_its_server_has_ended(running, matrix):
    with served(matrix, None) as (port, end), visited(running, port, strict=False) as page:
        until(page, "document.querySelector('.map-of').dataset.missing === '0'")
        end()
        page.locator(".map-of").focus()
        page.keyboard.press("ArrowUp")
        until(page, "document.querySelector('.warn')")
        words = "clearhead view has stopped. Start it again and reload."
        assert page.locator(".warn").text_content() == words


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("humpty dumpty sat on a wall", encoding="utf-8")
    command = [sys.executable, "-m", "clearhead", "view", "--text-file", str(text), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        address = running.stdout.readline().strip()
        port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", address).groups()
        status, page, _ = asked(int(port), f"/{token}/")
        assert status == 200
        assert b'"kind":"attention"' in page
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=20) == 0
        assert "Traceback" not in running.stderr.read()


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} cannot be used" in refused("view", "--text-file", tmp_path / "none.txt", "--port", port)
