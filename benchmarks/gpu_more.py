"""On a GPU, what follows a forward pass: the backward pass, effects, a borrowed log-sum-exp, and a watched model.

python -m benchmarks.gpu_more prints, for each case, milliseconds and ratios: of backward passes and of effects to the
fastest of PyTorch's backward passes; of observing with a borrowed log-sum-exp to the fastest of its forward passes,
which it contains; of watching a Llama of 1.2 B random weights at 32,768 tokens to not watching it. With
TRITON_INTERPRET=1 and --device cpu it runs without a GPU on small cases, and its times mean nothing.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import clearhead as ch
from benchmarks.gpu import BACKENDS, Call, peak_of, seconds_of, works

MATH = {"math": SDPBackend.MATH}
ASKED: Any = {"received": True, "entropy": True}


def calls(case: dict[str, Any], device: torch.device) -> Iterator[tuple[str, str, Call]]:
    """Each contestant as its name, what it is compared with, and the call."""
    causal = case["causal"]
    q, k, v = (torch.randn(case["shape"], device=device).bfloat16().requires_grad_() for _ in range(3))
    g, rules = torch.randn_like(q), {"causal": True} if causal else {}
    still = [x.detach() for x in (q, k, v)]

    def theirs(backend: Any, *tensors: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(*tensors, is_causal=causal)

    for name, backend in (BACKENDS if device.type == "cuda" else MATH).items():
        forward: Call = lambda backend=backend: theirs(backend, *still)  # noqa: E731
        if works(forward):
            out = theirs(backend, q, k, v)
            yield f"{name} forward", "forward", forward
            yield f"{name} backward", "backward", _backward(out, (q, k, v), g)
    ours = ch.AttentionMatrix(q, k, engine="triton", **rules) @ v
    yield "clearhead backward", "backward", _backward(ours, (q, k, v), g)
    matrix = ch.AttentionMatrix(*still[:2], engine="triton", **rules)
    for name in ("contributions", "cuts"):
        yield (
            name,
            "backward",
            lambda name=name: getattr(matrix, name)(still[2], g).observe(by_key=True, by_query=True),
        )
    yield "borrowed log-sum-exp", "forward", lambda: _borrowed(still, rules)


def _backward(out: torch.Tensor, leaves: tuple[torch.Tensor, ...], g: torch.Tensor) -> Call:
    return lambda: torch.autograd.grad(out, leaves, g, retain_graph=True)


def _borrowed(tensors: list[torch.Tensor], rules: dict[str, Any]) -> Any:
    """PyTorch's kernel computes output and log-sum-exp, and clearhead what it does not answer."""
    q, k, v = tensors
    if q.device.type == "cuda":
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, logsumexp, *_ = flash(q, k, v, 0.0, bool(rules), False)
    else:
        out = scaled_dot_product_attention(q, k, v, is_causal=bool(rules))
        logsumexp = ch.AttentionMatrix(q, k, engine="triton", **rules).observe(logsumexp=True).logsumexp
    return out, ch.AttentionMatrix(q, k, engine="triton", logsumexp=logsumexp, **rules).observe(**ASKED)


def watched(device: torch.device) -> dict[str, Call]:
    """A Llama of 1.2 B weights, or of few on a CPU, with random weights: read once with and once without ch.watch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    few = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 99}
    many = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32_000}
    tokens, sizes = (32_768, many) if device.type == "cuda" else (64, few)
    config = LlamaConfig(
        **sizes, num_attention_heads=sizes["hidden_size"] // 64, num_key_value_heads=1 if sizes is few else 8,
        max_position_embeddings=tokens, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    ids = torch.randint(0, config.vocab_size, (1, tokens), device=device)

    def run(*, watching: bool) -> Any:
        with torch.inference_mode():
            if not watching:
                return model(ids, use_cache=False, logits_to_keep=1)
            with ch.watch(model, **ASKED) as seen:
                model(ids, use_cache=False, logits_to_keep=1)
            return seen

    return {"sdpa": lambda: run(watching=False), "watched": lambda: run(watching=True)}


def table(device: torch.device) -> Iterator[str]:
    small = device.type == "cpu"
    lengths, heads = ((64,), 2) if small else ((4096, 16_384), 32)
    for n, d, causal in product(lengths, (64, 128), (False, True)):
        case = {"shape": (1 if small else 16_384 // n, heads, n, d), "causal": causal}
        name = f"b{case['shape'][0]} h{heads} n{n} d{d}" + " causal" * causal
        times: dict[str, tuple[str, float, int]] = {}
        for contestant, against, call in calls(case, device):
            times[contestant] = against, seconds_of(call, device), peak_of(call, device)
        best = {
            kind: min(
                seconds for who, (_, seconds, _) in times.items() if who.endswith(f" {kind}") and "clear" not in who
            )
            for kind in ("forward", "backward")
        }
        for who, (against, seconds, peak) in times.items():
            yield (
                f"{name:<28} {who:<22} {1e3 * seconds:10.3f} ms {seconds / best[against]:7.2f} × best {against:<8} "
                f"{peak / 1e6:9.1f} MB"
            )
    seconds = {name: (seconds_of(call, device), peak_of(call, device)) for name, call in watched(device).items()}
    for name, (taken, peak) in seconds.items():
        ratio = taken / seconds["sdpa"][0]
        yield f"{'Llama':<28} {name:<22} {1e3 * taken:10.3f} ms {ratio:7.2f} × sdpa {peak / 1e6:18.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for line in table(torch.device(parser.parse_args().device)):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
