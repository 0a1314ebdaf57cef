"""`clearhead view` serves the page to this machine only; bad requests get a reason and do not stop the server."""

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
from clearhead.view import long
from clearhead.view.answers import tile
from terminal import refused

server = pytest.importorskip("clearhead.view.server")
uvicorn = pytest.importorskip("uvicorn")
TOKEN = "a-token"
N, M = 20, 24


@pytest.fixture(scope="module")
def matrix():
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 4, N, 6)), rng.standard_normal((2, 2, M, 6))
    return ch.AttentionMatrix(q, k, causal=True, query_offset=M - N)


def served(matrix):
    """Batch item 1 of a matrix, served: its port, and what ends the server."""
    layer = long.ShownLayer("0", range(4), matrix.part(1))
    run = long.ShownRun("run", [layer], [f" w{place}" for place in range(M)])
    document = long.document([run], title="served", served=True)
    return listening_to(lambda: document, server.weights_of([run]))


@contextmanager
def listening_to(document, doors):
    """A server of a page and its doors: its port, and what ends it."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(server.application(document, doors, TOKEN), log_level="error", lifespan="off")
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
def port(matrix):
    with served(matrix) as (result, _):
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
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
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
    wish = {"rows": [3, 9], "cols": [2, 12], "step": 2}
    _, result, _ = asked(port, f"/{TOKEN}/tile", {**HEAD, **wish})
    expected = tile(matrix.part(1), 2, slice(3, 9), slice(2, 12), 2)
    assert expected[2, 1] == pytest.approx(weights[7:9, 4:6].max())
    assert np.array_equal(np.frombuffer(result, "<f4").reshape(3, 5), expected)


GOOD = {**HEAD, "rows": [0, 2], "cols": [0, 1], "step": 1}
BAD = (  # changes of a good question, and what is said
    ({"head": 4}, "head is 4: expected a whole number from 0 to 3"),
    ({"layer": "x"}, "layer is 'x'"),
    ({"rows": [0]}, "rows: expected two whole numbers"),
    ({"rows": [0, 0]}, "rows: expected 1 to"),
    ({"cols": [0, M + 1]}, f"cols is {M + 1}: expected a whole number from 0 to {M}"),
)


def test_a_bad_request_gets_a_reason_and_ends_no_server(port):
    for changes, words in BAD:
        status, said, _ = asked(port, f"/{TOKEN}/tile", {**GOOD, **changes})
        assert (status, words in said.decode()) == (400, True), (changes, said)
        assert asked(port, f"/{TOKEN}/tile", GOOD)[0] == 200


def test_many_requests_at_once_are_all_answered(port):
    result = []
    flood = [threading.Thread(target=lambda: result.append(asked(port, f"/{TOKEN}/tile", GOOD))) for _ in range(40)]
    for each in flood:
        each.start()
    for each in flood:
        each.join()
    assert {status for status, *_ in result} == {200}
    assert len({data for _, data, _ in result}) == 1


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


def test_a_served_page_shows_weights_and_says_where_their_making_is(running, port, matrix):
    with visited(running, port) as page:
        until(page, "document.querySelector('.map-of').dataset.missing === '0'")
        for key, head, i, j in ((None, 2, 15, 6), ("ArrowUp", 2, 14, 6), ("]", 3, 14, 6)):
            page.locator(".map-of").focus()
            if key:
                page.keyboard.press(key)
            until(page, f"document.querySelector('#head').textContent.endsWith('head {head}')")
            until(page, f"document.querySelector('#readout').textContent.startsWith('query {i} ')")
            said = page.locator("#readout").text_content()
            assert number(re.search(r": (\S+)", said)[1]) == pytest.approx(matrix[1, head, i, j], rel=6e-3)
        assert "clearhead explain TEXT --html PAGE" in page.locator(".dive .note").text_content()
        assert "ch.explain(" in page.locator(".answer p.note").text_content()


def test_a_page_says_when_its_server_has_ended(running, matrix):
    with served(matrix) as (port, end), visited(running, port, strict=False) as page:
        until(page, "document.querySelector('.map-of').dataset.missing === '0'")
        end()
        page.locator(".map-of").focus()
        page.keyboard.press("ArrowUp")
        until(page, "document.querySelector('.warn')")
        words = "clearhead view has stopped. Start it again and reload."
        assert page.locator(".warn").text_content() == words


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("humpty dumpty\nsat on a wall", encoding="utf-8")
    command = [sys.executable, "-m", "clearhead", "view", "--file", str(text), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        address = running.stdout.readline().strip()
        port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", address).groups()
        status, page, _ = asked(int(port), f"/{token}/")
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=20) == 0
        assert "Traceback" not in running.stderr.read()
    assert status == 200
    assert "humpty dumpty sat on a wall" in re.search(r"<title>(.*)<.title>", page.decode())[1]


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} cannot be used" in refused("view", "--file", tmp_path / "none.txt", "--port", port)
