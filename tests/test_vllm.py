"""clearhead in vLLM: the same as each request alone, what was asked of it, and what is refused when vLLM starts.

A stand-in of vLLM runs the classes here; tests marked long run vLLM itself, where it is installed.
"""

import importlib
import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
import clearhead.vllm
from clearhead.errors import EngineError, RuleError, UnknownNameError
from clearhead.vllm import records
from standin import CommonAttentionMetadata, CPUWorker, a_config, vllm

HEADS, KV_HEADS, D, LAYERS = 4, 2, 16, 3
Modules = dict[str, ModuleType]
__all__ = ["vllm"]  # a fixture


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> records.Recorder:
    """A fresh one."""
    made = records.Recorder()
    for module in list(sys.modules):
        if module.startswith("clearhead.vllm") and hasattr(sys.modules[module], "RECORDER"):
            monkeypatch.setattr(sys.modules[module], "RECORDER", made)
    return made


class Served:
    """A server of some layers whose queries, keys and values are drawn. Pages lie anywhere, and are NaN at first."""

    def __init__(self, page: int = 16, dtype: torch.dtype = torch.float32, **rules: Any) -> None:
        backend = importlib.import_module("clearhead.vllm.backend").Backend
        self.page, self.dtype, self.rules, self.impls = page, dtype, rules, []
        given = {"softcap": "logits_soft_cap", "alibi_slopes": "alibi_slopes", "window": "sliding_window"}
        named = {given.get(name, name): value for name, value in rules.items()}
        for _ in range(LAYERS):
            impl = backend.get_impl_cls()(HEADS, D, 0.3, KV_HEADS, **named)
            impl.process_weights_after_loading(dtype)
            self.impls.append(impl)
        self.caches = [torch.full((60, KV_HEADS, page, 2 * D), torch.nan).to(dtype) for _ in range(LAYERS)]
        spec = SimpleNamespace(block_size=page, head_size=D, head_size_v=D)
        cpu = torch.device("cpu")
        self.builders = [backend.get_builder_cls()(spec, [], None, cpu) for _ in range(2)]  # as for layers of two kinds
        self.worker = importlib.import_module("clearhead.vllm.worker").Worker(a_config().model_config)
        self.free = torch.randperm(60).tolist()
        self.texts: dict[str, list[torch.Tensor]] = {}  # of each request, its q, k and v: (layers, tokens, heads, d)
        self.pages: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def step(
        self, asked: dict[str, Any] | None = None, finished: tuple[str, ...] = (), **tokens: int
    ) -> dict[str, torch.Tensor]:
        """Requests compute so many tokens each; a new one has just as many, or PROMPT. The outputs by layer."""
        new = [name for name in tokens if name not in self.texts]
        ends, lengths, slots, queries = [0], [], [], []
        for name, count in tokens.items():
            if name in new:
                self.texts[name] = [torch.empty(LAYERS, 0, heads, D, dtype=self.dtype) for heads in (4, 2, 2)]
                self.pages[name], self.computed[name] = [], 0
            drawn = [torch.randn(LAYERS, count, heads, D).to(self.dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
            self.texts[name] = [torch.cat(pair, 1) for pair in zip(self.texts[name], drawn, strict=True)]
            first, self.computed[name] = self.computed[name], self.computed[name] + count
            while len(self.pages[name]) * self.page < self.computed[name]:
                self.pages[name].append(self.free.pop())
            places = [self.pages[name][i // self.page] * self.page + i % self.page for i in range(first, first + count)]
            ends.append(ends[-1] + count)
            lengths.append(self.computed[name])
            slots += places
            queries.append(drawn)
        table = torch.full((len(tokens), 9), 7**7, dtype=torch.int32)
        for row, name in enumerate(tokens):
            table[row, : len(self.pages[name])] = torch.tensor(self.pages[name])
        common = CommonAttentionMetadata(
            torch.tensor(ends, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), len(tokens), ends[-1] + 3,
            table, torch.tensor([*slots, -1, -1, -1]),
        )  # fmt: skip
        q, k, v = (torch.cat([one[i] for one in queries], 1) for i in range(3))
        padded = [torch.cat([x, torch.full_like(x[:, :1], torch.nan).expand(-1, 3, -1, -1)], 1) for x in (q, k, v)]

        def run() -> torch.Tensor:
            built, outputs = [builder.build(0, common) for builder in self.builders], []
            for layer, impl in enumerate(self.impls):
                of = SimpleNamespace(layer_name=f"model.layers.{layer}.self_attn.attn")
                output = torch.zeros_like(padded[0][layer])
                new = (x[layer] for x in padded)
                outputs.append(impl.forward(of, *new, self.caches[layer], built[layer % 2], output))
            return torch.stack(outputs)[:, : ends[-1]]

        prompts = {name: self.prompt.get(name, count) for name, count in tokens.items()}
        news = [
            SimpleNamespace(
                req_id=name, prompt_token_ids=[0] * prompts[name],
                sampling_params=SimpleNamespace(extra_args=(asked or {}).get(name)),
            )
            for name in new
        ]  # fmt: skip
        runner = self.worker.model_runner
        runner.input_batch = SimpleNamespace(req_ids=list(tokens))
        runner.requests = {
            name: SimpleNamespace(num_tokens=max(self.computed[name], self.prompt.get(name, 0))) for name in tokens
        }
        scheduled = SimpleNamespace(scheduled_new_reqs=news, finished_req_ids=set(finished), run=run)
        whole = self.worker.execute_model(scheduled)
        assert self.builders[0].build(0, common).step is None  # what vLLM computes between steps concerns nobody
        return {name: whole[:, ends[row] : ends[row + 1]] for row, name in enumerate(tokens)}

    prompt: dict[str, int] = {}  # noqa: RUF012  of requests whose first step is a part of their prompt

    def alone(self, name: str, layer: int, count: int) -> tuple[ch.AttentionMatrix, torch.Tensor]:
        """The matrix of the last so many queries and all keys of a request, and its values."""
        q, k, v = (x[layer].swapaxes(0, 1) for x in self.texts[name])
        rules = dict(self.rules)
        window = rules.pop("window", None)
        rules["window"] = (None if window is None else window - 1, 0)
        return ch.AttentionMatrix(q[:, -count:], k, scale=0.3, query_offset=k.shape[1] - count, **rules), v


RULES: dict[str, Any] = {
    "plain": {},
    "window and softcap": {"window": 20, "softcap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.0]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_get_what_each_gets_alone(vllm: Modules, rules: str, dtype: torch.dtype):
    served = Served(32, dtype, **RULES[rules])
    served.prompt = {"b": 90}
    for tokens in ({"a": 40}, {"a": 1, "b": 60}, {"b": 30, "c": 17, "a": 1}, {"c": 1, "a": 1, "b": 1}):
        for name, outputs in served.step(**tokens).items():
            for layer, output in enumerate(outputs):
                A, v = served.alone(name, layer, tokens[name])
                assert torch.equal(output, (A @ v).swapaxes(0, 1)), (name, layer)


def watched(served: Served, name: str, layer: int, heads: list[int], spans: list[list[int]]) -> dict[str, np.ndarray]:
    """The statistics of a request's last query, heads first."""
    A, v = served.alone(name, layer, 1)
    seen = A.observe(v, entropy=True, top=3)
    row = A[...][:, 0]
    values = {
        "entropy": seen.entropy[:, 0], "first": row[:, 0], "top_weights": seen.top.weights[:, 0],
        "top_keys": seen.top.indices[:, 0],
        "spans": torch.stack([row[:, start:stop].sum(-1) for start, stop in spans], -1),
    }  # fmt: skip
    return {key: value.float().numpy()[heads] for key, value in values.items()}


SPANS = [[0, 5], [3, 24]]
ALL = {"entropy": True, "first": True, "spans": SPANS, "top": 3}
ASKED: dict[str, Any] = {
    "a": {"clearhead": ALL},
    "b": {"clearhead": json.dumps({**ALL, "layers": [2, 0], "heads": [3, 1]})},
    "c": None,
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("names", ["a", "ab", "abc"])
def test_tokens_that_are_generated_have_the_statistics_that_were_asked_for(vllm: Modules, names: str, rules: str):
    served = Served(16, **RULES[rules])
    served.prompt = {"b": 50}
    expected: dict[str, list[Any]] = {name: [] for name in "ab"}
    for step in range(5):  # the prompt of b ends in the second
        served.step(ASKED, **{name: [24, 1][step > 0] if name != "b" else [30, 20, 1][min(step, 2)] for name in names})
        for name in set(names) - {"c"}:
            layers, heads = ([0, 1, 2], [0, 1, 2, 3]) if name == "a" else ([0, 2], [1, 3])
            if step or name == "a":
                expected[name].append([watched(served, name, layer, heads, SPANS) for layer in layers])
    for name in set(names) - {"c"}:
        seen = clearhead.vllm.statistics(name)
        assert seen["position"].tolist() == ([*range(23, 28)] if name == "a" else [*range(49, 53)])
        assert (seen["layers"], seen["heads"]) == (([0, 1, 2], [0, 1, 2, 3]) if name == "a" else ([0, 2], [1, 3]))
        for key in ("entropy", "first", "spans", "top_weights", "top_keys"):
            theirs = np.array([[layer[key] for layer in token] for token in expected[name]])
            np.testing.assert_allclose(seen[key], theirs, rtol=1e-5, atol=2e-6, err_msg=f"{name} {key}")
        assert served.worker.attention_statistics(name)["entropy"] == seen["entropy"].tolist()
    with pytest.raises(UnknownNameError, match="unknown request `c`"):
        clearhead.vllm.statistics("c")


def test_outputs_are_the_same_with_statistics(vllm: Modules):
    for name, outputs in (served := Served()).step(ASKED, a=24, c=30).items():
        A, v = served.alone(name, 0, outputs.shape[1])
        assert torch.equal(outputs[0], (A @ v).swapaxes(0, 1))
    outputs = served.step(a=1)["a"]
    A, v = served.alone("a", 0, 1)
    assert torch.equal(outputs[0], (A @ v).swapaxes(0, 1))


def test_statistics_go_to_a_file_line_by_line(vllm: Modules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLEARHEAD_VLLM_FILE", str(tmp_path / "seen.jsonl"))
    served = Served()
    for tokens in ({"a": 24}, {"a": 1, "b": 50}):
        served.step(ASKED, **tokens)
    lines = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert [(line["request"], line["position"]) for line in lines] == [("a", 23), ("a", 24), ("b", 49)]
    assert np.allclose(lines[2]["first"], [watched(served, "b", layer, [1, 3], SPANS)["first"] for layer in (0, 2)])
    with pytest.raises(UnknownNameError):
        clearhead.vllm.statistics("a")


def test_no_more_requests_are_kept_than_a_server_can_hold(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch, recorder: records.Recorder
):
    monkeypatch.setattr(records, "_MOST", 2)
    served = Served()
    for name in ("one-1234abcd", "two-1234abcd", "three-1234abcd"):
        served.step({name: {"clearhead": {"first": True}}}, tuple(served.texts), **{name: 5})
    assert len(recorder.asked) == 1  # the others are finished
    assert clearhead.vllm.statistics("three")["first"].shape == (1, 3, 4)
    with pytest.raises(UnknownNameError):
        clearhead.vllm.statistics("one")


def test_a_worker_with_a_part_of_the_heads_names_them_as_the_model_does(vllm: Modules):
    vllm["vllm.distributed.parallel_state"].get_tensor_model_parallel_rank = lambda: 1  # type: ignore[attr-defined]
    served = Served()
    served.worker.model_config.hf_text_config.num_attention_heads = 8
    served.step({"a": {"clearhead": {"entropy": True, "heads": [1, 5]}}}, a=20)
    seen = clearhead.vllm.statistics("a")
    assert seen["heads"] == [5]
    np.testing.assert_allclose(seen["entropy"][0, 0], watched(served, "a", 0, [1], SPANS)["entropy"], rtol=1e-5)


def installed(vllm: Modules, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The platform, after vLLM has called the entry point twice, as each of its processes may."""
    monkeypatch.setenv("CLEARHEAD_VLLM", "1")
    clearhead.vllm.register()
    clearhead.vllm.register()
    return vllm["vllm.platforms"].current_platform


def test_the_entry_point_registers_backend_and_worker(vllm: Modules, monkeypatch: pytest.MonkeyPatch):
    (point,) = entry_points(group="vllm.general_plugins", name="clearhead")
    assert point.load() is clearhead.vllm.register
    platform, config = installed(vllm, monkeypatch), a_config()
    platform.check_and_update_config(config)
    assert not hasattr(platform.check_and_update_config.__wrapped__, "__wrapped__")
    registered = vllm["vllm.v1.attention.backends.registry"].registered
    for path in (*registered.values(), config.parallel_config.worker_cls):
        module, _, name = path.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), name), (CPUWorker, _base(vllm)))


def _base(vllm: Modules) -> type:
    return vllm["vllm.v1.attention.backend"].AttentionBackend


@pytest.mark.parametrize("value", ["", "0"])
def test_nothing_happens_unless_the_variable_says_so(vllm: Modules, monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("CLEARHEAD_VLLM", value)
    clearhead.vllm.register()
    assert not vllm["vllm.v1.attention.backends.registry"].registered
    assert "clearhead.vllm.platform" not in sys.modules


def test_other_values_and_other_devices_are_refused(vllm: Modules, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLEARHEAD_VLLM", "yes")
    with pytest.raises(RuleError, match="CLEARHEAD_VLLM is 'yes': expected 1, or 0"):
        clearhead.vllm.register()
    type(vllm["vllm.platforms"].current_platform).device_type = "cuda"
    with pytest.raises(RuleError, match="CLEARHEAD_VLLM is 1 but vLLM runs on cuda"):
        installed(vllm, monkeypatch)


REFUSED: dict[str, tuple[str, Any]] = {
    "kv_cache_dtype fp8": ("cache__cache_dtype", "fp8"),
    "latent attention": ("model__use_mla", True),
    "encoder-decoder models": ("model__is_encoder_decoder", True),
    "bidirectional parts": ("model__is_mm_prefix_lm", True),
    "R-SWA": ("model__rswa_window", 8),
    "use_non_causal": ("attention__use_non_causal", True),
    "speculative decoding": ("speculative_config", object()),
    "a KV connector": ("kv_transfer_config", object()),
    "context parallelism": ("parallel__decode_context_parallel_size", 2),
    "pages of 24": ("cache__block_size", 24),
    "second model runner": ("use_v2_model_runner", True),
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_clearhead_cannot_is_refused_by_name_at_the_start(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch, named: str
):
    name, value = REFUSED[named]
    with pytest.raises(EngineError, match=f"clearhead cannot serve this in vLLM: .*{named}"):
        installed(vllm, monkeypatch).check_and_update_config(a_config(**{name: value}))


def test_layers_that_share_a_cache_only_read_it(vllm: Modules):
    served = Served(kv_sharing_target_layer_name="model.layers.0.self_attn.attn")
    served.step(a=3)
    assert all(cache.isnan().all() for cache in served.caches)


def test_so_are_layers_of_other_kinds(vllm: Modules):
    with pytest.raises(EngineError, match="a layer of this model is of type encoder_only"):
        Served(attn_type="encoder_only")
    builder = importlib.import_module("clearhead.vllm.backend").Builder
    with pytest.raises(EngineError, match="values of another width than keys"):
        builder(SimpleNamespace(block_size=16, head_size=16, head_size_v=8), [], None, torch.device("cpu"))


WRONG: dict[str, tuple[Any, str]] = {
    "no dictionary": (["entropy"], "clearhead is .*: expected a dictionary, or one as JSON"),
    "no JSON": ("{entropy}", "expected a dictionary, or one as JSON"),
    "an unknown choice": ({"entropie": True}, "a choice of the request is 'entropie': expected layers, heads"),
    "a text for a flag": ({"entropy": "yes"}, "entropy is 'yes': expected True or False"),
    "nothing": ({"layers": [0]}, "clearhead has nothing to watch"),
    "a layer too many": ({"first": True, "layers": [3]}, r"layers is \[3\]: expected .* from 0 to 2"),
    "heads that are no list": ({"first": True, "heads": 1}, "heads is 1: expected a list"),
    "a span that is empty": ({"spans": [[3, 3]]}, r"spans is .*: expected a list of \[start, stop\)"),
    "a span beyond the prompt": ({"spans": [[0, 31]]}, "within the prompt's 30 tokens"),
    "more keys than there are": ({"top": 31}, "top is 31: expected a number of keys up to the prompt's 30 tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_request_with_wrong_choices_is_refused_before_the_engine(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch, name: str
):
    value, message = WRONG[name]
    platform = installed(vllm, monkeypatch)
    platform.check_and_update_config(a_config())
    prompt, params = {"prompt_token_ids": [0] * 30}, SimpleNamespace(extra_args={"clearhead": value})
    with pytest.raises(RuleError, match=message):
        platform.validate_request(prompt, params)
    platform.validate_request(prompt, SimpleNamespace(extra_args={"another": 3}))
    platform.validate_request(prompt, SimpleNamespace())
