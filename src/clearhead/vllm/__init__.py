"""clearhead as the attention of vLLM on CPUs, with statistics of the requests that ask for them.

    CLEARHEAD_VLLM=1 python -m vllm.entrypoints.openai.api_server …  # without the variable nothing happens

vLLM finds clearhead by its entry point in vllm.general_plugins. Keys and values lie in vLLM's own pages and are read
there (`clearhead.torch.varlen_attn`). A request asks by an extra argument:
`SamplingParams(extra_args={"clearhead": {"entropy": True}})`, over HTTP the same as text in `vllm_xargs`. What it asked
for is written to the file that CLEARHEAD_VLLM_FILE names, a line of JSON for each token.
What vLLM can ask and clearhead cannot, such as fp8 caches, is refused by name when vLLM starts.
"""

import os

from clearhead.errors import RuleError, expected


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
