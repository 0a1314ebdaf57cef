"""`clearhead serve`: what its page shows is what the library computes; one run at a time, and none without a reader."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import clearhead as ch
from browser import axe, listened, number, until
from clearhead.explaining import serving
from clearhead.explaining.answers import REPLY
from clearhead.models.finding import SHIPPED_HERE
from clearhead.models.protocol import Variant
from dense_gpt2 import WORDS
from page_files import header_in, header_of
from seeds import fresh
from terminal import refused
from test_chat import TEMPLATE, with_template
from test_view import TOKEN, asked, listening_to, server

RUN = f"/{TOKEN}/run"


@pytest.fixture(scope="module")
def port():
    served = serving.Served(SHIPPED_HERE, ch.load_model(), "en")
    desk = server.Desk(lambda *given: serving.run(served, *given))
    with listening_to(lambda: serving.page(served), {"run": desk.run}) as (made, _):
        yield made


def lines_of(port, **question):
    status, data, _ = asked(port, RUN, {"page": "a", **question})
    assert status == 200, data
    return [json.loads(line) for line in data.splitlines()]


def a_text(words=6):
    return " ".join(fresh().choice(WORDS.split(), words))


def test_an_answer_comes_word_by_word_and_then_why(port):
    text, model = a_text(), ch.load_model()
    *lines, last = lines_of(port, text=text)
    said = [line["said"] for line in lines if "said" in line]
    ids = model.generate(text, REPLY, ends=True)
    assert said == [model.tokenizer.decoded(ids[: count + 1]) for count in range(len(ids))]
    assert [line["stage"] for line in lines if "stage" in line] == ["parts", "heads"]
    header, found = header_in(last["page"]["clearhead"]), ch.explain(text)
    assert "live" not in header  # the server runs the model
    assert header["why"]["answer"] == found.answer
    assert [part["hidden"] for part in header["why"]["parts"]] == pytest.approx([p.hidden for p in found.ranked])
    against = lines_of(port, text=text, answer=found.answer, against=" wall" if found.answer != " wall" else " hill")
    assert header_in(against[-1]["page"]["clearhead"])["why"]["against"]["text"] in (" wall", " hill")


def test_a_long_reply_is_told_whole_and_its_beginning_explained():
    model, text, lines, again = with_template(ch.load_model(), TEMPLATE), a_text(), [], []
    served = serving.Served("chat", model, "en")
    serving.run(served, {"text": text}, lines.append, iter)
    *_, said, _, _, last = lines
    ids = model.generate(model.tokenizer.chat([{"role": "user", "content": text}]).text, 200, ends=True)
    assert said == {"said": model.tokenizer.decoded(ids)}
    assert header_in(last["page"]["clearhead"])["why"]["answer"].strip() == model.tokenizer.decoded(ids[:REPLY]).strip()
    serving.run(served, {"text": text, "again": True}, again.append, iter)  # the page was loaded anew
    assert again == [said, last]


def test_a_change_is_the_true_one_beside_its_estimate(port):
    text = a_text()
    count, found = lines_of(port, text=text)[-1]["number"], ch.explain(text)

    def without(**what):
        return lines_of(port, number=count, **what)[-1]["without"]

    part = found.parts[int(fresh().integers(len(found.parts)))]
    word = without(word=part.tokens[0])
    assert (word["text"], word["truth"], word["estimate"]) == (
        part.text,
        *map(pytest.approx, (part.hidden, -part.effect)),
    )
    assert (word["was"], word["share"]) == pytest.approx((found.probability, part.share))
    assert without(sentence=part.tokens[0])["estimate"] == pytest.approx(-sum(each.effect for each in found.parts))
    layer, head = map(int, fresh().integers((2, 8)))
    off = without(head=[layer, head])
    assert off["truth"] == pytest.approx(found.estimate.heads_run[layer, head], abs=1e-5)
    target, run = found.again.based[0][:2]  # the estimate goes on as the head begins to fade
    less = Variant(None, target.rows.start, {(layer, head): -0.02 * run.layers[layer].heads[head, target.rows.start :]})
    (logits,) = found.model.again(run, [less], target.rows)
    assert off["estimate"] == pytest.approx((target.value(logits)[0] - found.value) / 0.02, rel=0.1, abs=0.02)
    for edge in found.edges[:4]:
        cut = without(edge=list(edge[:4]))
        assert cut["truth"] == pytest.approx(edge.truth, abs=1e-5)
        assert cut["estimate"] is not None


def test_an_edge_before_the_answer_is_cut_as_change_cuts_it(port):
    text, model = a_text(), ch.load_model()
    last = lines_of(port, text=text)[-1]
    found, rng = ch.explain(text), fresh()
    query, target = int(rng.integers(1, len(found.tokens) - 1)), found.again.based[0].target
    layer, head, key = int(rng.integers(2)), int(rng.integers(8)), int(rng.integers(1, query + 1))  # never the first
    rest = {"rest": found.again.rest} if found.again.rest == "first" else {}
    with ch.change(model, ch.cut(queries=query, keys=key, layers=[layer], heads=[head], **rest)):
        run = model.run(target.ids)
    expected = target.value(np.asarray(run.logits[target.rows.start :]))[0] - found.value
    cut = lines_of(port, number=last["number"], edge=[layer, head, query, key])[-1]["without"]
    assert (cut["truth"], cut["estimate"]) == (pytest.approx(expected, abs=1e-4), None)


ODD = (  # what is asked, and a part of what is said
    ({"text": ""}, "text is ''"),
    ({"text": " \n"}, "a text that is not empty"),
    ({"text": 3}, "text is 3"),
    ({"text": ["a"]}, "a text that is not empty"),
    ({}, "text is None"),
    ({"text": "a " * 3000}, "positions"),
    ({"text": "\ud800"}, "UTF-8"),
    ({"text": "mary", "model": "../../etc/passwd"}, "none of the models"),
    ({"text": "mary", "model": "\0"}, "none of the models"),
    ({"text": "mary", "model": {"a": 1}}, "none of the models"),
    ({"text": "mary had", "answer": 7}, "answer is 7"),
    ({"text": "mary had", "answer": " a", "against": " a"}, "are both"),
    ({"number": 10**9, "word": 0}, "asked since"),
    ({"number": None}, "asked since"),
)
WRONG = (  # in place of a word, a sentence, a head or an edge of a text of three tokens
    {},
    {"word": 3},
    {"word": -1},
    {"word": True},
    {"word": "mary"},
    {"word": 2},  # the last one, which answers
    {"sentence": [0, 1]},
    {"head": 1},
    {"head": [2, 0]},
    {"head": [0, 8]},
    {"edge": [0, 0, 1]},
    {"edge": [0, 0, 1, 2]},  # a later key
    {"edge": [0, 0, 3, 0]},
    {"edge": [0.5, 0, 1, 0]},
)


def test_odd_questions_get_a_reason_and_end_no_server(port):
    for question, words in ODD:
        assert words in lines_of(port, **question)[-1]["error"], question
    count = lines_of(port, text="mary had a")[-1]["number"]
    for question in WRONG:
        assert re.search("expected|there is no|never hidden", lines_of(port, number=count, **question)[-1]["error"])
    for text in ("\0mary\0 had", "👩\u200d🚀 had a", "<|endoftext|> mary", "\u202emary had", "</script><b>"):
        assert lines_of(port, text=text)[-1]["page"]
    for body, status in (("", 400), ("[]", 400), ('{"page": 3}', 400), ("[" * 10**5, 400), ("x" * (2**18 + 1), 413)):
        assert asked(port, RUN, body, method="POST")[0] == status
    assert asked(port, RUN, {"page": "a", "text": "a"}, Origin="http://evil.example")[0] == 403
    assert asked(port, RUN, {"page": "a", "text": "a"}, Host="evil.example")[0] == 400
    assert asked(port, f"/{TOKEN}x/run", {"page": "a", "text": "a"})[0] == 404
    assert asked(port, f"/{TOKEN}/../run", {"page": "a"})[0] == 404
    assert "serve" in header_of(asked(port, f"/{TOKEN}/")[1].decode())


def test_one_run_at_a_time_and_none_without_a_reader():
    begun, ended, go_on = (threading.Semaphore(0) for _ in range(3))

    def work(asked, tell, each):
        tell({"said": asked["text"]})
        begun.release()
        try:
            for _ in each(range(2**20)):
                go_on.acquire(timeout=0.01)
        finally:
            ended.release()

    with listening_to(None, {"run": server.Desk(work).run}) as (port, _):

        def opened(page, text):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", RUN, json.dumps({"page": page, "text": text}))
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.readline())) == (200, {"said": text})
            return answer, connection

        first = opened("a", "one")
        status, words, _ = asked(port, RUN, {"page": "b", "text": "two"})
        assert (status, words.decode()) == (409, "another page's run is not done yet: one at a time")
        assert not ended.acquire(timeout=0.1)
        second = opened("a", "three")  # the same page asks something new
        assert ended.acquire(timeout=20)
        assert json.loads(first[0].read()) == {"error": "the run was stopped."}
        for each in second:  # the page is closed
            each.close()
        assert ended.acquire(timeout=20)
        third = opened("b", "four")
        for each in (*third, *first):
            each.close()
        assert ended.acquire(timeout=20)


@contextmanager
def started():
    """`clearhead serve` in a process of its own: the process, its port and the secret of its address."""
    command, piped = [sys.executable, "-m", "clearhead", "serve", "--no-open"], subprocess.PIPE
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # glibc adds arenas of 23 MB at random, which hide a leak
    with subprocess.Popen(command, stdout=piped, stderr=piped, text=True, env=environment) as running:
        yield running, *re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/\n", running.stdout.readline()).groups()
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == 0
        assert running.stderr.read() == ""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.gate
def test_memory_stays_bounded_over_hundreds_of_requests():
    rng, sizes = fresh(), []
    with started() as (running, port, token):

        def last(**question):
            status, data, _ = asked(int(port), f"/{token}/run", {"page": "a", **question})
            assert status == 200, data
            return json.loads(data.splitlines()[-1])

        for place in range(401):
            if place % 100 == 0:
                count = last(text=a_text(4))["number"]
                sizes.append(int(Path(f"/proc/{running.pid}/statm").read_text(encoding="ascii").split()[1]) * 4096)
            layer, head, key = map(int, rng.integers((2, 8, 3)))
            right = [{"word": key}, {"head": [layer, head]}, {"edge": [layer, head, 3, key]}, {"edge": [9, 9, 9, 9]}]
            last(number=count, **right[place % 4])
    assert sizes[-1] - sizes[1] < 12 * 2**20, sizes  # 40 kB for each request; the heap grows by up to 6 MB at random


def test_the_page_shows_the_answer_why_and_the_runs_without(running, port):
    unwanted, text = [], "humpty dumpty sat on a"
    context = running.new_context(viewport={"width": 1280, "height": 900}, bypass_csp=True)
    page = listened(context.new_page(), unwanted)
    page.goto(f"http://127.0.0.1:{port}/{TOKEN}/")
    page.fill("#serve-text", text)
    page.keyboard.press("Enter")
    until(page, "document.querySelector('h1')?.textContent.startsWith('Why')")
    until(page, "document.querySelector('.served').getAttribute('aria-busy') === 'false'")
    found = ch.explain(text)
    assert page.locator(".said").text_content().startswith(text + found.answer)
    head = ".heads [data-place='0 3']"
    acts = [
        lambda: page.dblclick(".passage [data-token='1']"),
        lambda: page.dblclick(head),
        lambda: page.keyboard.press("s"),
    ]
    for count, act in enumerate(acts, 1):
        act()
        until(page, f"document.querySelectorAll('.try .pan tbody tr').length === {count}")
    rows = {
        row[0]: row[1:]
        for row in page.locator(".try .pan tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        )
    }
    part = next(each for each in found.parts if 1 in each.tokens)
    assert number(rows[part.text][1]) == pytest.approx(part.hidden, abs=0.006)
    assert number(rows[part.text][2]) == pytest.approx(-part.effect, abs=0.006)
    assert number(rows["0.3"][1]) == pytest.approx(found.estimate.heads_run[0, 3], abs=0.006)
    page.locator("#serve-against").press_sequentially(" hill")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('h1').textContent.includes('hill')")
    page.reload()
    until(page, "document.querySelector('h1')?.textContent.includes('hill')")
    assert page.locator(".said").text_content().startswith(text + found.answer)
    page.click("#language")
    assert page.locator("#serve-ask").text_content() == "提问"
    assert page.locator("#serve-model option").first.text_content().startswith("随包附带的模型")
    assert not axe(page)
    page.locator(".next .more").first.click()  # a word more
    until(page, "document.querySelector('#serve-text').value === 'humpty dumpty sat on a wall'")
    until(page, "document.querySelector('.served').getAttribute('aria-busy') === 'false'")
    assert [each for each in unwanted if "404" not in each] == []  # an icon, which the page's policy forbids
    context.close()


def test_the_command_ends_in_mid_run_with_ctrl_c():
    with started() as (_, port, token):
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        connection.request("POST", f"/{token}/run", json.dumps({"page": "a", "text": "humpty dumpty sat on a"}))
        answer = connection.getresponse()
        assert b"said" in answer.readline()
    answer.close()
    connection.close()
    assert "no such file" in refused("serve", "--model", "./none.gguf", "--no-open")
