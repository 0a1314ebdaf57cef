"""Many requests that arrive by chance, with statistics: python -m benchmarks.traffic --model FOLDER

Needs an environment with vLLM and clearhead. So many workers, each a vLLM of its own, get a share of ragged requests,
whose arrivals are those of a Poisson process; every request is watched. Printed as lines of JSON: memory as it goes on,
and in the end whether all requests were answered, how long they took, and whether the statistics of some, drawn by
chance, are those of Transformers' eager attention over the same tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ASKED: dict[str, Any] = {"entropy": True, "first": True, "spans": [[1, 4], [2, 8]], "top": 2}
RESIDENT = 4096 / 2**20  # MiB in a page of memory


def drawn(options: argparse.Namespace, words: int) -> list[tuple[float, list[int], int]]:
    """Requests: when each arrives in seconds, its prompt, and how many tokens it wants."""
    chance, count = np.random.default_rng(0), options.requests
    arrivals = np.cumsum(chance.exponential(1 / options.rate, count))
    lengths, new = np.minimum(8 + chance.exponential(60, count), 300).astype(int), chance.integers(1, 33, count)
    prompts = [chance.integers(5, words, n).tolist() for n in lengths]
    return list(zip(arrivals.tolist(), prompts, new.tolist(), strict=True))


def worker(options: argparse.Namespace) -> None:
    """Answer every so-many-th request; a line for each that is finished, with the process's memory."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=options.model, dtype="float32", max_model_len=512, block_size=32, enforce_eager=True,
        skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 25,
    )  # fmt: skip
    engine = llm.llm_engine
    requests = drawn(options, engine.model_config.get_vocab_size())
    waiting = list(range(options.serve, options.requests, options.workers))
    start = time.monotonic()
    while waiting or engine.has_unfinished_requests():
        now = time.monotonic() - start
        while waiting and requests[waiting[0]][0] <= now:
            place = waiting.pop(0)
            _, prompt, new = requests[place]
            extra = None if options.unwatched else {"clearhead": ASKED}
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, extra_args=extra)
            engine.add_request(str(place), {"prompt_token_ids": prompt}, params)
        if not engine.has_unfinished_requests():
            time.sleep(0.002)
            continue
        for one in engine.step():
            if one.finished:
                place = int(one.request_id)
                line: dict[str, Any] = {"place": place, "late": time.monotonic() - start - requests[place][0]}
                line["tokens"] = list(one.outputs[0].token_ids)
                line["mib"] = int(Path("/proc/self/statm").read_text().split()[1]) * RESIDENT
                print("answer " + json.dumps(line), flush=True)


def wrong(model: Any, text: list[int], seen: list[dict[str, Any]]) -> float:
    """The largest difference of a request's statistics, a line a token, from eager attention's over its tokens."""
    import torch

    with torch.no_grad():
        attentions = model(torch.tensor([text[:-1]]), output_attentions=True).attentions
    weights = torch.stack(attentions)[:, 0, :, [one["position"] for one in seen]].permute(2, 0, 1, 3).double()
    theirs = {
        "entropy": -torch.special.xlogy(weights, weights).sum(-1), "first": weights[..., 0],
        "spans": torch.stack([weights[..., start:stop].sum(-1) for start, stop in ASKED["spans"]], -1),
        "top_weights": weights.topk(ASKED["top"]).values,
    }  # fmt: skip
    return max(float((torch.tensor([one[name] for one in seen]) - x).abs().max()) for name, x in theirs.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=8.0, help="arrivals a second")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checked", type=int, default=20, help="requests whose statistics are computed again")
    parser.add_argument("--unwatched", action="store_true", help="vLLM alone, for its memory")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        worker(options)
        return
    surroundings = os.environ | {
        "CLEARHEAD_VLLM": str(int(not options.unwatched)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.traffic", *sys.argv[1:], "--serve"]
    with tempfile.TemporaryDirectory() as folder:
        seen_by = [Path(folder, f"seen{i}.jsonl") for i in range(options.workers)]
        said = [Path(folder, f"said{i}") for i in range(options.workers)]
        workers = []
        for i in range(options.workers):
            local = surroundings | {"CLEARHEAD_VLLM_FILE": str(seen_by[i])}
            with said[i].open("w") as out:
                run = [*command, str(i)]
                workers.append(subprocess.Popen(run, env=local, stdout=out, stderr=subprocess.DEVNULL))
        if sum(each.wait() for each in workers):
            raise SystemExit("a worker ended early")
        answers = [[json.loads(x[7:]) for x in path.read_text().splitlines() if x[:7] == "answer "] for path in said]
        seen: dict[int, list[dict[str, Any]]] = {}
        for path in seen_by:
            for line in map(json.loads, () if options.unwatched else path.open()):
                seen.setdefault(int(line["request"].rpartition("-")[0]), []).append(line)
    memory = [[round(each[i]["mib"]) for i in np.linspace(0, len(each) - 1, 6).astype(int)] for each in answers]
    print(json.dumps({"resident_mib_from_first_to_last_request": memory}))
    if options.unwatched:
        return

    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="eager").eval()
    requests = drawn(options, model.config.vocab_size)
    tokens = {line["place"]: line["tokens"] for each in answers for line in each}
    whole = all(len(tokens[place]) == len(seen[place]) == requests[place][2] for place in tokens)
    print(json.dumps({"asked": options.requests, "answered": len(tokens), "every_token_with_statistics": whole}))
    late = np.percentile([line["late"] for each in answers for line in each], [50, 99, 100]).round(3).tolist()
    print(json.dumps({"seconds_from_arrival_to_end_p50_p99_most": late}))
    checked = np.random.default_rng(1).choice(options.requests, options.checked, replace=False).tolist()
    differences = [wrong(model, requests[place][1] + tokens[place], seen[place]) for place in checked]
    print(json.dumps({"checked": len(differences), "largest_difference": max(differences)}))


if __name__ == "__main__":
    main()
