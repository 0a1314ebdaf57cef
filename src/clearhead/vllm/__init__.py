"""clearhead as the attention of vLLM on CPUs, with statistics of the requests that ask for them.

    CLEARHEAD_VLLM=1 python -m vllm.entrypoints.openai.api_server …  # without the variable nothing changes

vLLM finds clearhead by its entry point in vllm.general_plugins. Keys and values stay in vLLM's pages, where
`clearhead.torch.varlen_attn` reads them. A request asks for statistics by an extra argument:
`SamplingParams(extra_args={"clearhead": {"entropy": True}})`; over HTTP, by the same as text in `vllm_xargs`. They are
written to the file that CLEARHEAD_VLLM_FILE names, one line of JSON per token.
Features of vLLM that clearhead lacks, such as fp8 caches, are refused by name when vLLM starts.
"""

import os

from clearhead.errors import RuleError, expected


def register() -> None:
    """Replace vLLM's attention on CPUs by clearhead's, if the environment variable CLEARHEAD_VLLM is 1.

    vLLM calls this in each of its processes. Raises RuleError for another value, or if vLLM does not run on a CPU.
    """
    chosen = os.environ.get("CLEARHEAD_VLLM", "")
    if chosen not in ("", "0", "1"):
        raise RuleError(expected("CLEARHEAD_VLLM", chosen, "1, or 0"))
    if chosen == "1":
        from clearhead.vllm.platform import install

        install()
