"""Tensors on a device: Triton's interpreter computes on them there, or the portable engine; the native one refuses."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
import clearhead.hf
import watched
from clearhead.core.arrays import DeviceArray
from clearhead.core.axes import Array
from clearhead.errors import DtypeError, EngineError
from device import DEVICE

PLACE = "interpreter" if DEVICE == "cpu" else f"{DEVICE}:0"
pytestmark = pytest.mark.gate  # but for what is marked long; Triton's interpreter is slow

RULES: dict[str, Any] = {
    "scale": -0.6, "softcap": 2.0, "causal": True, "window": (9, None), "query_offset": np.array([[0], [4]]),
    "kv_lengths": np.array([[11], [14]]), "query_lengths": np.array([[9], [7]]), "alibi_slopes": np.ones(4) / 3,
    "sinks": np.ones(4),
}  # fmt: skip


def inputs() -> tuple[dict[str, Array], dict[str, Any]]:
    rng = np.random.default_rng(0)
    arrays = {"q": rng.standard_normal((2, 1, 4, 9, 6)), "k": rng.standard_normal((2, 1, 2, 14, 6))}
    arrays["v"] = rng.standard_normal((2, 1, 2, 14, 5))
    rules = {**RULES, "bias": rng.standard_normal((4, 9, 14)), "mask": rng.random((2, 1, 1, 1, 14)) < 0.8}
    return arrays, rules


def there(x: Any) -> DeviceArray:
    return DeviceArray(torch.from_numpy(x).to(DEVICE))


def here(x: Any) -> Array:
    assert isinstance(x, DeviceArray)
    return x.tensor.cpu().numpy()


@pytest.mark.parametrize("moved", [("bias", "mask"), pytest.param((), marks=pytest.mark.long)])
def test_every_result_is_the_cpus_and_stays_on_the_device(moved: tuple[str, ...]):
    arrays, rules = inputs()
    q, k, v = (there(x) for x in arrays.values())
    passed = {**rules, **{name: there(rules[name]) for name in moved}}
    asked: dict[str, Any] = {"logsumexp": True, "entropy": True, "received": True, "peak": True, "image": (3, 4)}
    matrix, truth = ch.AttentionMatrix(q, k, **passed), ch.AttentionMatrix(arrays["q"], arrays["k"], **rules)
    for queries in (slice(None), slice(-1, 2, -2)):
        result, expected = (
            a.observe(x, top=3, **asked, queries=queries) for a, x in ((matrix, v), (truth, arrays["v"]))
        )
        for name in (*asked, "output"):
            np.testing.assert_allclose(here(getattr(result, name)), getattr(expected, name), 1e-9, err_msg=name)
        np.testing.assert_array_equal(here(result.top.indices), expected.top.indices)
    np.testing.assert_array_equal(here(matrix @ v), here(ch.attention(q, k, v, **passed)))
    np.testing.assert_allclose(here(matrix @ there(np.ones(14))), truth @ np.ones(14), 1e-9)
    np.testing.assert_allclose(here(matrix.T @ there(np.ones((9, 2)))), truth.T @ np.ones((9, 2)), 1e-9)
    for index in (np.s_[1, 0, 3, 7], np.s_[..., 5:2:-1, ::3], np.s_[:, 0, 1:], np.s_[..., 4:4]):
        np.testing.assert_allclose(here(matrix[index]), truth[index], 1e-9, 1e-300, err_msg=str(index))
    np.testing.assert_allclose(np.asarray(matrix), truth[...], 1e-9, 1e-300)
    engine, experimental, native = str(ch.plan(q, k)).split("\n")
    assert engine == "engine: triton"
    assert experimental.startswith("experimental: its kernels are tested in Triton's interpreter")
    assert native.startswith(f"not native: the arrays are on device {PLACE}")


def test_the_native_engine_refuses_tensors_of_a_device():
    arrays, _ = inputs()
    q, k, v = (there(x) for x in arrays.values())
    with pytest.raises(EngineError, match=f"the arrays are on device {PLACE}: this engine runs on the CPU"):
        ch.attention(q, k, v, engine="native")
    with pytest.raises(DtypeError, match=rf"^k is on device cpu but q is on device {PLACE}\."):
        ch.attention(q, arrays["k"], v)
    with pytest.raises(DtypeError, match=rf"^v is on device cpu but q is on device {PLACE}\."):
        ch.AttentionMatrix(q, k) @ arrays["v"]


@pytest.mark.parametrize(
    "asked",
    [
        "entropy logsumexp output",
        "distance output",
        pytest.param("received", marks=pytest.mark.long),
        "image peak max_logit top diagonal",
    ],
)
@pytest.mark.parametrize("queries", [slice(-2, 1, -3), pytest.param(slice(None), marks=pytest.mark.long)])
def test_gradients_on_the_device_equal_those_of_the_cpu(asked: str, queries: slice, monkeypatch: pytest.MonkeyPatch):
    """With CPU tensors that are treated as a device's."""
    arrays, rules = inputs()
    special: dict[str, Any] = {"image": (3, 4), "top": 2}
    result: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for pretend, grads in ((False, expected), (True, result)):
        if pretend:
            monkeypatch.setattr("clearhead.core.arrays._from_torch", lambda torch, x, name: DeviceArray(x.detach()))
        leaves = {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items()}
        more = ("bias", "sinks") if "entropy" in asked else ("sinks",)  # that of a bias is recomputed there
        leaves |= {name: torch.tensor(rules[name], requires_grad=True) for name in more}
        others = {name: x for name, x in rules.items() if name not in leaves}
        matrix = ch.AttentionMatrix(leaves["q"], leaves["k"], **others, **{name: leaves[name] for name in more})
        flags: Any = {name: special.get(name, True) for name in asked.split() if name != "output"}
        seen = matrix.observe(leaves["v"] if "output" in asked else None, **flags, queries=queries)
        losses = np.random.default_rng(1)
        answers = [seen.top.weights if name == "top" else getattr(seen, name) for name in asked.split()]
        sees = [torch.where(torch.isfinite(x), x, 0.0) for x in answers]
        sum((x * torch.from_numpy(losses.standard_normal(x.shape))).sum() for x in sees).backward()
        grads |= {name: x.grad for name, x in leaves.items() if x.grad is not None}
    assert set(result) == set(expected)
    for name, x in expected.items():
        np.testing.assert_allclose(result[name], x, 1e-8, 1e-12, err_msg=name)


def test_the_portable_engine_does_there_what_triton_does_not():
    arrays, rules = inputs()
    q, k, v = (there(x) for x in arrays.values())
    g, x = np.random.default_rng(1).standard_normal((2, 1, 4, 9, 5)), np.ones((14, 2))
    labels = np.arange(9) // 2, np.arange(14) // 5
    matrix, truth = ch.AttentionMatrix(q, k, **rules), ch.AttentionMatrix(arrays["q"], arrays["k"], **rules)
    np.testing.assert_allclose(here(matrix.groups(*labels)), truth.groups(*labels), 1e-9)
    asked: Any = {"by_key": True, "by_query": True, "top": 3, "strongest": 5, "image": (3, 4), "groups": labels}
    for kind in ("contributions", "cut_effects"):
        effects, expected = getattr(matrix, kind)(v, there(g)), getattr(truth, kind)(arrays["v"], g)
        pairs = zip(*(separate(each.observe(**asked)) for each in (effects, expected)), strict=True)
        for result, right in (*pairs, (effects @ there(x), expected @ x), (effects.T @ there(g), expected.T @ g)):
            np.testing.assert_allclose(here(result), right, 1e-8, 1e-12)
        np.testing.assert_allclose(here(effects[..., 1:7, ::2]), expected[..., 1:7, ::2], 1e-8, 1e-12)


def separate(seen: Any) -> list[Any]:
    """The arrays of observed effects."""
    parts = (seen.by_key, seen.by_query, seen.groups, seen.image), seen.top, seen.strongest
    return [x for part in parts for x in part]


def test_rollout_stays_on_the_device():
    q = inputs()[0]["q"]
    square = [ch.AttentionMatrix(make(q), make(q)) for make in (there, np.asarray)]
    np.testing.assert_allclose(here(ch.rollout(square[:1] * 2, query=3)), ch.rollout(square[1:] * 2, query=3), 1e-9)


def test_a_model_on_a_device_is_watched(monkeypatch: pytest.MonkeyPatch):
    """A small GPT-2 generates the same as on the CPU when its tensors are treated as a device's."""
    model = watched.build("gpt2", n_layer=1)
    ids = torch.tensor([[5, 3, 8, 2, 7], [1, 1, 4, 9, 6]])
    result = []
    for pretend in (False, True):
        if pretend:
            monkeypatch.setattr("clearhead.core.arrays._from_torch", lambda torch, x, name: DeviceArray(x.detach()))
            monkeypatch.setattr("clearhead.core.call.key_of", lambda *arrays: None)  # that of tensors on a GPU
        real = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
        with ch.watch(model, entropy=True, received=True, distance=True, top=2, image=(3, 4)) as seen:
            model.generate(ids, attention_mask=real, max_new_tokens=2, do_sample=False)
        answers = [getattr(seen[0], name) for name in ("logsumexp", "entropy", "received", "distance", "image")]
        flow = ch.rollout([seen.matrix(name) for name in seen.layers], query=2)
        result.append([*answers, flow, seen.matrix(0)[...], *seen[0].top, str(seen.summary())])
    for ours, theirs in zip(result[1][:-1], result[0][:-1], strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-4, 1e-5)
    assert result[0][-1] == result[1][-1]


TEXTS = [one for one in watched.FAMILIES if one.kind in ("decoder", "encoder") and one.name != "gpt-oss"]


@pytest.mark.long
@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("family", TEXTS, ids=lambda family: family.name)
def test_a_model_on_the_device_attends_as_on_the_cpu(family: watched.Family, padding: str):
    results = []
    for device in ("cpu", DEVICE):
        passed = {name: x.to(device) for name, x in watched.inputs(family, padding).items()}
        output = watched.build(family, attn_implementation="clearhead").to(device)(**passed)[0]
        seen = watched.run_watched(watched.build(family).to(device), passed, entropy=True, received=True)[1]
        layers = [(seen[name].entropy, seen[name].received, seen.matrix(name)[...]) for name in seen.layers]
        results.append([output.detach(), *(x for layer in layers for x in layer)])
    for x, y in zip(*results, strict=True):
        assert y.device.type == DEVICE
        torch.testing.assert_close(y.cpu(), x, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_tools_take_tensors_of_the_device():
    x = torch.randn(2, 4, 6, 8).to(DEVICE)
    rules = {"mask": torch.ones(6, 6, device=DEVICE) > 0}
    assert ch.trace(x, x, x, **rules).difference < 1e-5
    assert "scale" in str(ch.diagnose(x, x, x, torch.softmax(x @ x.mT, -1) @ x, **rules))
    cache = ch.nn.KVCache(batch=2, kv_heads=4, d_k=8, d_v=8, device=DEVICE)
    for some in (x[:, :, :3], x[:, :, 3:]):
        k, v, rules = cache.append(some, some, counts=torch.tensor([3, 2]))
        assert ch.attention(some.requires_grad_(), k, v, causal=True, **rules).device.type == DEVICE


@pytest.mark.long
def test_elsewhere_everything_is_as_on_the_cpu():
    """In a process of its own, since PyTorch has one such device for a whole process."""
    files = [Path(__file__), Path(__file__).with_name("test_on_tensors.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "not elsewhere", "-m", "long or not long", *files]
    elsewhere = {**os.environ, "CLEARHEAD_DEVICE": "elsewhere"}
    result = subprocess.run(command, env=elsewhere, capture_output=True, text=True, check=False)
    assert not result.returncode, result.stdout[-3000:]
