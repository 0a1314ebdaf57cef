"""`explain` with edits, against the same edits made by hand with dense masks, in NumPy and in Transformers."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

import clearhead as ch
from browser import browser, opened
from clearhead.changing.edits_text import edits_from_options
from clearhead.errors import DtypeError, RuleError, SelectionError
from clearhead.explaining import gpt2
from clearhead.explaining.explain import explain
from seeds import fresh
from terminal import call

WORDS = "humpty dumpty sat on a wall and had great fall the king horses men jack jill went up hill little lamb mary"
TEXT = "mary had a little"
shipped = cache(gpt2.load)


def by_hand(model, ids, added, factors):
    """A GPT-2 in float64 with dense logits: `added` (layers, heads, n, n), `factors` (layers, heads) of outputs.

    Returns the last token's probabilities, the weights (layers, heads, n, n) and the heads' outputs.
    """
    w, config = {name: x.astype(np.float64) for name, x in model.weights.items()}, model.config
    n, width = len(ids), config.d_model // config.heads

    def normal(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.epsilon) * w[f"{name}.weight"] + w[f"{name}.bias"]

    hidden = w["wte.weight"][ids] + w["wpe.weight"][:n]
    weights, outputs = [], []
    for layer in range(config.layers):
        name = f"h.{layer}"
        x = normal(hidden, f"{name}.ln_1")
        q, k, v = ((x @ w[f"{name}.attn.w_{p}"] + w[f"{name}.attn.b_{p}"]).reshape(n, -1, width) for p in "qkv")
        logits = np.einsum("ihc,jhc->hij", q, k) / width**0.5 + added[layer]
        logits = np.where(np.tri(n, dtype=bool), logits, -np.inf)
        high = logits.max(-1, keepdims=True)
        a = np.exp(logits - np.where(np.isfinite(high), high, 0))
        a = a / np.where(a.sum(-1, keepdims=True) > 0, a.sum(-1, keepdims=True), 1)  # a row without keys is 0
        o = np.einsum("hij,jhc->hic", a, v) * factors[layer][:, None, None]
        weights.append(a)
        outputs.append(o)
        joined = o.swapaxes(0, 1).reshape(n, -1)
        hidden = hidden + joined @ w[f"{name}.attn.c_proj.weight"] + w[f"{name}.attn.c_proj.bias"]
        y = normal(hidden, f"{name}.ln_2") @ w[f"{name}.mlp.c_fc.weight"] + w[f"{name}.mlp.c_fc.bias"]
        y = 0.5 * y * (1 + np.tanh((2 / np.pi) ** 0.5 * (y + 0.044715 * y**3)))
        hidden = hidden + y @ w[f"{name}.mlp.c_proj.weight"] + w[f"{name}.mlp.c_proj.bias"]
    last = normal(hidden, "ln_f")[-1] @ w["lm_head.weight"].T
    shares = np.exp(last - last.max())
    return shares / shares.sum(), np.stack(weights), np.stack(outputs)


def drawn(rng):
    """A text of words, arguments of the command line, and what they add and multiply by hand."""
    words = [str(word) for word in rng.choice(WORDS.split(), rng.integers(4, 9), replace=False)]
    text = " ".join(words)
    model = shipped()
    tokens = model.tokens(text)
    n, (layers, heads) = len(tokens), (model.config.layers, model.config.heads)
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    places = [
        [i for i, t in enumerate(tokens) if start < t.stop <= start + len(word)]
        for start, word in zip(starts, words, strict=False)
    ]
    added, factors, options = np.zeros((layers, heads, n, n)), np.ones((layers, heads)), []
    for _ in range(rng.integers(1, 4)):
        layer, head, kind = (
            int(rng.integers(layers)),
            int(rng.integers(heads)),
            ("cut", "boost", "off")[rng.integers(3)],
        )
        one = bool(rng.integers(2))  # one head, or the whole layer
        chosen, where = ((layer,), (head,) if one else range(heads)), f"{layer}.{head}" if one else f"{layer}"
        grid = np.ix_(*chosen)
        if kind == "off":
            factors[grid] = 0
            options += ["--off", where]
            continue
        key = int(rng.integers(len(words) - 1))
        query = int(rng.integers(key, len(words)))
        number = float(np.round(rng.normal(0, 2), 2))
        amount = -np.inf if kind == "cut" else number
        added[np.ix_(*chosen, places[query], places[key])] += amount
        keys = words[key] if rng.integers(2) else ",".join(map(str, places[key]))
        pair = f"{words[query]}>{keys}"
        options += [f"--{kind}", f"{pair}@{where}" if kind == "cut" else f"{pair}={number}@{where}"]
    return text, [t.id for t in tokens], options, added, factors


def test_terminal_and_json_have_the_numbers_of_edits_made_by_hand(tmp_path):
    model, place = shipped(), tmp_path / "seen.json"
    for _ in range(6):
        text, ids, options, added, factors = drawn(fresh())
        done = call("explain", text, *options, "--json", place)
        assert done.returncode == 0, (options, done.stderr)
        seen = json.loads(place.read_text(encoding="utf-8"))
        shares, weights, outputs = by_hand(model, ids, added, factors)
        plain, plain_weights, plain_outputs = by_hand(model, ids, 0 * factors[..., None, None], np.ones_like(factors))
        layer, head = seen["layer"], seen["head"]
        np.testing.assert_allclose(seen["head_steps"]["weights"], weights[layer, head], atol=2e-5)
        np.testing.assert_allclose(seen["before"]["head_steps"]["weights"], plain_weights[layer, head], atol=2e-5)
        np.testing.assert_allclose(seen["token_arithmetic"]["weights"], weights[layer, head, -1], atol=2e-5)
        for side, truth in ((seen, shares), (seen["before"], plain)):
            np.testing.assert_allclose([c["probability"] for c in side["next"]], np.sort(truth)[::-1][:5], atol=2e-5)
            np.testing.assert_allclose([truth[c["id"]] for c in side["next"]], np.sort(truth)[::-1][:5], atol=2e-5)
        for token in seen["moved"]["next"]:
            assert token["before"] == pytest.approx(plain[token["id"]], abs=2e-5)
            assert token["after"] == pytest.approx(shares[token["id"]], abs=2e-5)
        assert max(abs(t["after"] - t["before"]) for t in seen["moved"]["next"]) == pytest.approx(
            np.abs(shares - plain).max(), abs=4e-5
        )
        moved = np.linalg.norm((outputs - plain_outputs)[:, :, -1], axis=-1)
        np.testing.assert_allclose(seen["moved"]["head_distance"], moved, atol=2e-4)
        np.testing.assert_allclose(
            seen["moved"]["head_length"], np.linalg.norm(plain_outputs[:, :, -1], axis=-1), atol=2e-4
        )
        assert_printed(done.stdout, seen)


def assert_printed(text, seen):
    """The terminal has the numbers of the JSON."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("next tokens")) + 2
    for line, token in zip(lines[start : start + 8], seen["moved"]["next"], strict=False):
        before, after = (float(x[:-1]) / 100 for x in line.split()[-3:-1])
        assert before == pytest.approx(token["before"], rel=0.06, abs=6e-5)
        assert after == pytest.approx(token["after"], rel=0.06, abs=6e-5)
        assert float(line.split()[-1]) == pytest.approx(100 * (token["after"] - token["before"]), rel=0.06, abs=6e-3)
    rows = lines[next(i for i, line in enumerate(lines) if "row of A" in line) + 2 :]
    both = np.array([seen["before"]["token_arithmetic"]["weights"], seen["token_arithmetic"]["weights"]])
    for line in rows[: min(8, both.shape[1])]:
        key = int(line.split()[0])
        for word, weight in zip(line.split()[-3:-1], both[:, key], strict=True):
            assert weight == (0 if word == "masked" else pytest.approx(float(word), abs=6e-5))


def test_transformers_gives_the_same_and_its_eager_attention_with_a_dense_mask_too():
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from clearhead.explaining import hub

    place = Path(gpt2.__file__).parents[1] / "models" / gpt2.SHIPPED
    other = hub.load(str(place))
    eager = hf.AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager", dtype=torch.float32)
    for _ in range(2):
        text, ids, options, added, factors = drawn(fresh())
        while np.isneginf(added + np.where(np.tri(len(ids)), 0, -np.inf)).all(-1).any():  # eager has no empty rows
            text, ids, options, added, factors = drawn(fresh())
        edits = edits_from_options(zip([o[2:] for o in options[::2]], options[1::2], strict=True), None, None)
        one, two = (explain(text, model, edits=edits) for model in (shipped(), other))
        np.testing.assert_allclose(one.moved.distance, two.moved.distance, atol=2e-4)
        theirs = {token.id: token.after for token in two.moved.next}
        both = [(token.after, theirs[token.id]) for token in one.moved.next if token.id in theirs]
        np.testing.assert_allclose(*zip(*both, strict=True), atol=2e-5)
        for layer in range(2):
            mine, theirs = one.runs[layer], two.runs[layer]
            np.testing.assert_allclose(mine.heads, theirs.heads, atol=1e-4)
            np.testing.assert_allclose(mine.output, theirs.output, atol=2e-4)
        hooks = [
            block.attn.c_proj.register_forward_pre_hook(
                lambda _, given, own=own: given[0] * torch.tensor(own).float().repeat_interleave(64)
            )
            for block, own in zip(eager.transformer.h, factors, strict=True)
        ]
        for block, own in zip(eager.transformer.h, added, strict=True):
            hooks.append(block.attn.register_forward_pre_hook(_masked(torch.tensor(own).float()), with_kwargs=True))
        with torch.no_grad():
            shares = eager(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
        for hook in hooks:
            hook.remove()
        truth = [float(shares[token.id]) for token in one.moved.next]
        assert [token.after for token in one.moved.next] == pytest.approx(truth, abs=2e-5)


def _masked(own):
    """A hook that adds these logits to a layer's dense mask, (heads, n, n)."""

    def before(_, given, named):
        import torch

        causal = torch.triu(torch.full(own.shape[1:], torch.finfo(torch.float32).min), 1)
        mask = (causal + own.clamp(min=torch.finfo(torch.float32).min)).clamp(min=torch.finfo(torch.float32).min)
        return given, {**named, "attention_mask": mask[None]}

    return before


def test_without_edits_nothing_changes():
    seen = explain(TEXT, shipped())
    assert (seen.edits, seen.before, seen.moved) == ((), None, None)
    assert not {"edits", "before", "moved"} & set(seen.to_json())
    same = explain(TEXT, shipped(), edits=ch.boost(keys="mary", by=0), layer=seen.layer, head=seen.head)
    assert same.moved.heads(5) == []
    np.testing.assert_array_equal(same.trace.weights, seen.trace.weights)
    assert same.before.next == seen.next == same.next
    assert same.to_json()["before"] == seen.to_json()


def test_the_edited_head_that_moved_furthest_is_shown_unless_another_is_chosen():
    cut = ch.cut(queries="little", keys="mary", heads={0: [1, 2], 1: [4]})
    seen = explain(TEXT, shipped(), edits=cut)
    among = {place: seen.moved.distance[place] for place in ((0, 1), (0, 2), (1, 4))}
    assert (seen.layer, seen.head) == max(among, key=among.get)
    assert explain(TEXT, shipped(), edits=cut, layer=1).head == 4
    other = explain(TEXT, shipped(), edits=cut, layer=1, head=0)
    assert (other.layer, other.head) == (1, 0)
    assert explain(TEXT, shipped(), edits=cut, head=7).head == 7


def test_a_head_that_is_off_says_so_and_passes_nothing_on():
    seen = explain(TEXT, shipped(), edits=[ch.off(layers=[1], heads=[2]), ch.scaled(0.5, layers=[1], heads=[3])])
    run = seen.runs[1]
    assert run.factors.tolist() == [1, 1, 0, 0.5, 1, 1, 1, 1]
    assert not run.heads[2].any()
    np.testing.assert_allclose(run.heads[3], seen.before.runs[1].heads[3] / 2, atol=1e-6)
    assert seen.to_json()["head_factors"] == [None, run.factors.tolist()]
    done = call("explain", TEXT, "--off", "1.2")
    assert "the edits multiply this head's output by 0 after A·V" in done.stdout
    assert "the edits do not change these weights" in done.stdout
    assert call("explain", TEXT, "--off", "--layer", 1, "--head", 2).stdout.splitlines()[4:] == [
        line for line in done.stdout.splitlines()[4:] if "chosen since" not in line
    ]


# the command line


@pytest.mark.parametrize(
    ("kind", "text", "edit"),
    [
        ("cut", "on>sat", ch.cut(queries="on", keys="sat", layers=[1], heads=[5])),
        ("cut", "on>sat@0.3", ch.cut(queries="on", keys="sat", layers=[0], heads=[3])),
        ("cut", "on>sat@0", ch.cut(queries="on", keys="sat", layers=[0])),
        ("cut", "on>sat@.3", ch.cut(queries="on", keys="sat", heads=[3])),
        ("cut", ">0:2@0.3,1.2,1.4", ch.cut(keys=slice(0, 2), heads={0: [3], 1: [2, 4]})),
        ("cut", " on > sat#2 , -1 @0.1", ch.cut(queries="on", keys=["sat#2", -1], layers=[0], heads=[1])),
        ("cut", "2:>:@0", ch.cut(queries=slice(2, None), keys=slice(None, None), layers=[0])),
        ("cut", "on>", ch.cut(queries="on", layers=[1], heads=[5])),
        ("boost", "sat=2", ch.boost(keys="sat", by=2, layers=[1], heads=[5])),
        ("boost", "on>sat,on=-1e-1@1", ch.boost(queries="on", keys=["sat", "on"], by=-0.1, layers=[1])),
        ("off", "", ch.off(layers=[1], heads=[5])),
        ("off", "0.3,0.4", ch.off(layers=[0], heads=[3, 4])),
        ("off", "0,1", ch.off(layers=[0, 1])),
    ],
)
def test_an_option_is_an_edit(kind, text, edit):
    assert edits_from_options([(kind, text)], 1, 5) == [edit]


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        ("cut", "on", "expected QUERIES>KEYS"),
        ("cut", ">", "neither queries nor keys"),
        ("cut", "on>egg", "no such word"),
        ("cut", "on>Sat", "did you mean 'sat'"),
        ("cut", "4>0", "position 4, and the text has 4 tokens. hint: positions are 0 to 3"),
        ("cut", "on>9:", "its keys are none of the text's 4 tokens"),
        ("cut", "humpty>on", "these queries do not see these keys"),
        ("cut", "on>sat@2", "there is no layer 2 in model rhymes"),
        ("cut", "on>sat@0.8", "there is no head 8 in model rhymes, which has 8"),
        ("cut", "on>sat@0,1.2", "expected LAYER.HEAD after @"),
        ("cut", "on>sat@x", "expected LAYER.HEAD after @"),
        ("boost", "sat", "expected KEYS=NUMBER"),
        ("boost", "sat=x", "expected KEYS=NUMBER"),
        ("boost", "sat=inf", "expected a finite number"),
        ("boost", "=2", "boost has no keys"),
        ("off", "x", "expected LAYER.HEAD"),
        ("off", " ", "it names no layer and no head"),
        ("off", "0.99", "there is no head 99"),
    ],
)
def test_an_edit_that_cannot_act_is_refused_by_name(option, value, what, tmp_path):
    done = call("explain", "humpty dumpty sat on", f"--{option}", value, "--json", tmp_path / "seen.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert what in done.stderr
    assert option in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_edits_are_for_one_run_of_a_text(tmp_path):
    place = tmp_path / "text.txt"
    place.write_text("humpty dumpty sat on")
    assert call("explain", "--file", place, "--cut", "on>sat").returncode == 0
    for more in (["--windows"], ["--html", tmp_path / "page.html"]):
        done = call("explain", "--file", place, "--cut", "on>sat", *more)
        assert done.returncode == 2
        assert "--cut, --boost and --off are for one run of a text" in done.stderr


@pytest.mark.parametrize(
    ("edits", "error", "what"),
    [
        (ch.off(heads=[1], to="mean"), RuleError, "explain shows cut, boost, share"),
        ([], RuleError, "edits is empty"),
        ("cut", DtypeError, "expected an edit"),
        (ch.cut(keys=[True, False]), SelectionError, "2 entries, and the text has 4 tokens"),
        (ch.cut(keys="mary", layers=["x"]), SelectionError, "there is no layer 'x'"),
        (ch.share(queries="mary", keys="had", at_least=0.5), SelectionError, "do not see these keys"),
    ],
)
def test_edits_that_explain_does_not_show_are_refused(edits, error, what):
    with pytest.raises(error, match=what):
        explain(TEXT, shipped(), edits=edits)


def test_share_and_tempered_are_shown_too():
    edits = [ch.share(keys="had", at_least=0.7, layers=[0]), ch.tempered(2)]
    seen = explain(TEXT, shipped(), layer=0, head=4, edits=edits)
    truth = explain(TEXT, shipped(), layer=0, head=4).trace
    given = np.where(np.isneginf(truth.masked), -np.inf, truth.masked)
    for i, row in enumerate(given):
        a = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        part = a[1]
        if 0 < part < 0.7 and i > 0:
            a = np.where(np.arange(4) == 1, 0.7, a * 0.3 / (1 - part))
        a = np.sqrt(a) / np.sqrt(a).sum()
        np.testing.assert_allclose(seen.trace.weights[i], a, atol=2e-5)


LONG = "there was an old woman who lived in a shoe she had so many children she did not know what to do"


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("text", ["humpty dumpty sat on", LONG, f"{LONG} {LONG.replace('there', 'here')}", "猫 sat"])
@pytest.mark.parametrize("colour", [{}, {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}])
def test_every_line_fits_eighty_columns(language, text, colour, monkeypatch):
    import terminal

    options = ["--cut=-1>0", "--boost", "0=1.5", "--off", "1.2"]
    monkeypatch.setattr(terminal.pytest.MonkeyPatch, "delenv", lambda *_, **__: None)
    for name, value in colour.items():
        monkeypatch.setenv(name, value)
    done = call("explain", text, *options, "--lang", language)
    assert done.returncode == 0, done.stderr
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert max(cell_len(line) for line in plain.splitlines()) <= 80
    assert ("\x1b[38;2;" in done.stdout) == bool(colour)
    if language == "zh":
        for english in ("before", "after", "moved", "chosen", "masked", "layer 0", "change"):
            assert english not in plain.replace("layers=", ""), english
        for chinese in ("改动前", "改动后", "变化", "下一个词元", "被遮蔽"):
            assert chinese in plain


def test_the_shipped_model_is_edited_without_pytorch(tmp_path):
    program = (
        "import sys\nfrom clearhead.cli import main\n"
        "code = main(['explain', 'mary had a little', '--cut', 'little>mary', '--off', '0.3', '--boost', 'had=1', "
        f"'--html', {str(tmp_path / 'page.html')!r}, '--json', {str(tmp_path / 'seen.json')!r}])\n"
        "loaded = [name for name in ('torch', 'transformers', 'jax') if name in sys.modules]\n"
        "sys.exit(code or len(loaded) and 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "lamb" in done.stdout


# the page


@pytest.fixture(scope="module")
def running():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    edits = [ch.cut(queries="little", keys="mary", layers=[0]), ch.off(layers=[0], heads=[3])]
    seen = explain(TEXT, shipped(), edits=edits, layer=0, head=3)
    place = tmp_path_factory.mktemp("page") / "edited.html"
    seen.save(place)
    return seen, place


def test_the_page_holds_both_runs_and_a_switch_shows_either(running, edited):
    seen, place = edited
    with opened(running, place) as (page, unwanted):
        switch = page.get_by_role("switch", name="with the edits")
        assert switch.is_checked()
        assert_page(page, seen, seen)
        assert "multiplies this head's output by 0" in page.locator("#step-heads").text_content()
        switch.click()
        assert not page.locator("#pick-edited").is_checked()
        assert page.evaluate("document.activeElement.id") == "pick-edited"
        assert_page(page, seen.before, seen)
        assert "multiplies" not in page.locator("#step-heads").text_content()
        page.keyboard.press("e")
        assert page.locator("#pick-edited").is_checked()
        page.locator("#pick-edited").focus()
        page.keyboard.press("e")
        page.keyboard.press("Space")
        assert page.locator("#pick-edited").is_checked()
        page.keyboard.press("e")
        assert not page.locator("#pick-edited").is_checked()
        page.locator("#language").click()
        assert page.get_by_role("switch", name="应用改动").count() == 1
        assert unwanted == []


def assert_page(page, run, seen):
    """The page shows this run's weights, next token, layer output and statistics."""
    page.evaluate("document.querySelector('.map a[data-step=checked]').click()")
    page.locator("#step-checked .checks li").first.wait_for()
    table = page.locator("#step-weights details.numbers")
    table.locator("summary").click()
    table.locator("tbody td").first.wait_for()
    for i, row in enumerate(table.locator("tbody tr").all()):
        for j, text in enumerate(row.locator("td").all_text_contents()):
            hidden = np.isneginf(run.trace.masked[i, j])
            assert text == "masked" if hidden else abs(float(text) - run.trace.weights[i, j]) < 1e-4
    first = page.locator(".next li").first.text_content()
    assert run.next[0].text.strip() in first
    assert ("without the edits" if run is seen else "with the edits") in first
    for line in page.locator("#step-checked .checks li").all_text_contents()[1:]:
        number = float(re.sub(r"[^\d.e-]+$", "", line.split()[-1].replace("−", "-")))
        assert number < 1e-4, line


def test_a_page_without_edits_has_no_switch(running, tmp_path):
    explain(TEXT, shipped()).save(tmp_path / "page.html")
    with opened(running, tmp_path / "page.html") as (page, unwanted):
        assert page.locator("#pick-edited").count() == 0
        page.keyboard.press("e")
        assert unwanted == []


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.slow)])
def test_the_switch_is_accessible_and_nothing_is_cut_off(running, edited, width):
    axe = Path(__file__).parents[1] / "page/node_modules/axe-core/axe.min.js"
    if not axe.exists():
        pytest.skip("axe-core is not installed: npm ci in page/")
    with opened(running, edited[1], width, bypass_csp=True) as (page, _):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.evaluate(axe.read_text(encoding="utf-8"))
        found = page.evaluate("axe.run().then(r => r.violations.map(v => v.id + ': ' + v.nodes[0].html.slice(0, 200)))")
        assert found == []


def test_arrays_that_both_runs_share_are_stored_once(edited):
    from clearhead.explaining.explain import document

    header, arrays = document(edited[0]).header, document(edited[0]).arrays
    first, second = header["layers"][0]["arrays"], header["edited"]["layers"][0]["arrays"]
    assert first["w_q"] == second["w_q"]
    assert first["output"] != second["output"]
    assert sum(name.endswith("w_o") for name in arrays) == 1
