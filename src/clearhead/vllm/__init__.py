"""clearhead as the attention of vLLM on CPUs, with statistics of the requests that ask for them.

    CLEARHEAD_VLLM=1 python -m vllm.entrypoints.openai.api_server …  # without the variable nothing happens

vLLM finds clearhead by its entry point in vllm.general_plugins. Keys and values lie in vLLM's own pages and are read
there (`clearhead.torch.varlen_attn`). A request asks by an extra argument:
`SamplingParams(extra_args={"clearhead": {"entropy": True}})`, over HTTP the same as text in `vllm_xargs`.
What vLLM can ask and clearhead cannot, such as fp8 caches, is refused by name when vLLM starts.
"""

import os
from typing import Any

from clearhead.errors import RuleError, expected
from clearhead.vllm.records import RECORDER


def register() -> None:
    """Put clearhead in the place of vLLM's attention on CPUs, where the environment variable CLEARHEAD_VLLM is 1.

    vLLM calls this in each of its processes. Raises RuleError for another value, or where vLLM does not run on a CPU.
    """
    chosen = os.environ.get("CLEARHEAD_VLLM", "")
    if chosen not in ("", "0", "1"):
        raise RuleError(expected("CLEARHEAD_VLLM", chosen, "1, or 0"))
    if chosen == "1":
        from clearhead.vllm.platform import install

        install()


def statistics(request_id: str) -> dict[str, Any]:
    """What a request asked for, as arrays: one row for each token that it has generated.

    A request that ended at a stop string has one row more: vLLM finds the string while the next token is computed.

    request_id    as vLLM's output has it

    Returns `request`, vLLM's own longer name; `layers` and `heads`, those that were watched; `position` (tokens,), the
    position of the query that the token came from; and of what was asked for: `entropy` and `first` (tokens, layers,
    heads), `spans` (tokens, layers, heads, spans), `top_weights` and `top_keys` (tokens, layers, heads, k).

    For vLLM in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0); else ask its worker, which answers lists in place of
    arrays: `llm.collective_rpc("attention_statistics", args=(request_id,))`. Of CLEARHEAD_VLLM_MEMORY MiB (default 256)
    the oldest requests go first. Raises UnknownNameError for what is not kept, and where CLEARHEAD_VLLM_FILE names a
    file, to which all is written instead.
    """
    return RECORDER.statistics(request_id)
