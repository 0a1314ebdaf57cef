"""clearhead beside vLLM's own attention on CPUs, in one run: python -m benchmarks.serving --model FOLDER

Needs an environment with vLLM and clearhead. Two servers are loaded, one of each attention, and take turns; decoding is
the median of a step, all requests together. Times are the processor's (of all threads), which other programs on the
machine disturb less than a clock's. Prints a line of JSON for each measurement.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

REQUESTS = 8
SEEN: dict[str, Any] = {
    "nothing": None,
    "entropy and shares": {"entropy": True, "spans": [[0, 1], [0, 16], [16, 40]]},
    "all": {"entropy": True, "spans": [[0, 1], [0, 16], [16, 40]], "top": 8},
    "all, of two layers": {"entropy": True, "spans": [[0, 1], [0, 16], [16, 40]], "top": 8, "layers": [9, 19]},
}


def serve(model: str, dtype: str, page: int, threads: int) -> None:
    """Answer requests from stdin, a line of JSON each."""
    import numpy as np
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, dtype=dtype, block_size=page, max_model_len=4096, enforce_eager=True, skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 30,
    )  # fmt: skip
    if (os.environ["CLEARHEAD_VLLM"] == "1") != ("clearhead.vllm.backend" in sys.modules):
        raise SystemExit("vLLM could not load clearhead: its log says why")
    engine, count = llm.llm_engine, 0
    words = engine.model_config.get_vocab_size()
    print("ready", threads, file=sys.stderr)
    for line in sys.stdin:
        asked = json.loads(line)
        drawn = np.random.default_rng(asked["length"])
        extra = asked["seen"] and {"clearhead": asked["seen"]}
        params = SamplingParams(
            temperature=0, max_tokens=asked["new"], ignore_eos=True, detokenize=False, extra_args=extra
        )
        if asked["cold"]:
            llm.reset_prefix_cache()
        for i in range(REQUESTS):
            prompt = drawn.integers(5, words, asked["length"] - 3 * i).tolist()
            engine.add_request(f"r{count + i}", {"prompt_token_ids": prompt}, params)
        count += REQUESTS
        steps, tokens, begun = [], {}, set()
        while engine.has_unfinished_requests():
            decoding, start = len(begun) == REQUESTS, time.process_time()
            outputs = engine.step()
            steps.append((decoding, time.process_time() - start))
            begun |= {one.request_id for one in outputs}
            tokens |= {one.request_id: list(one.outputs[0].token_ids) for one in outputs}
        answer = {
            "prefill_s": sum(s for decoding, s in steps if not decoding),
            "step_ms": 1e3 * median([s for decoding, s in steps if decoding] or [0.0]),
            "tokens": list(tokens.values()),
        }
        print("answer " + json.dumps(answer), flush=True)


class Server:
    """A process with one of the two attentions."""

    def __init__(self, chosen: str, arguments: list[str], threads: int) -> None:
        surroundings = os.environ | {
            "CLEARHEAD_VLLM": chosen, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
            "CLEARHEAD_VLLM_FILE": os.devnull,
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.serving", "--serve", *arguments]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        self.process = subprocess.Popen(command, env=surroundings, **pipes)

    def ask(self, **asked: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line[7:])
        raise SystemExit("a server ended early")


def compare(servers: dict[str, Server], setting: dict[str, Any], length: int, rounds: int, new: int) -> None:
    """Print the prefill of each server and, in turns, how fast each decodes, with and without statistics."""
    cold = {name: server.ask(length=length, new=new, seen=None, cold=True) for name, server in servers.items()}
    same = sum(a == b for a, b in zip(*(one["tokens"] for one in cold.values()), strict=True))
    prefill = {name: round(one["prefill_s"], 2) for name, one in cold.items()}
    print(json.dumps(setting | {"length": length, "prefill_s": prefill, "same_tokens": f"{same} of {REQUESTS}"}))
    steps: dict[str, list[float]] = {}
    for _ in range(rounds):  # the prompts' pages are still there, so that decoding alone is repeated
        for name, server in servers.items():
            for seen, asked in SEEN.items():
                if seen == "nothing" or name == "clearhead":
                    answer = server.ask(length=length, new=new, seen=asked, cold=False)
                    steps.setdefault(f"{name}, {seen}", []).append(answer["step_ms"])
    rates = {name: round(1e3 * REQUESTS / median(each), 1) for name, each in steps.items()}
    print(json.dumps(setting | {"length": length, "tokens_per_s": rates}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--page", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--length", nargs="+", type=int, default=[64, 512, 2000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.model, options.dtype[0], options.page[0], options.threads)
        return
    for dtype in options.dtype:
        for page in options.page:
            arguments = ["--model", options.model, "--dtype", dtype, "--page", str(page)]
            servers = {name: Server(on, arguments, options.threads) for name, on in (("vllm", "0"), ("clearhead", "1"))}
            for server in servers.values():
                server.ask(length=48, new=8, seen=None, cold=True)
            for length in options.length:
                compare(servers, {"dtype": dtype, "page": page}, length, options.rounds, options.new)
            for server in servers.values():
                server.process.stdin.close()
                server.process.wait()


if __name__ == "__main__":
    main()
