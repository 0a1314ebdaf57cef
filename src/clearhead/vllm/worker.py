"""vLLM's worker on CPUs, extended to tell the recorder about each step's requests."""

from typing import Any

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.worker.cpu_worker import CPUWorker

from clearhead.vllm.records import RECORDER, read_asked


class Worker(CPUWorker):  # type: ignore[misc]
    """vLLM makes one in each of its worker processes."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one step."""
        model = self.model_config
        RECORDER.first_head = get_tensor_model_parallel_rank() * model.get_num_attention_heads(self.parallel_config)
        for new in scheduler_output.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None)
            asked = read_asked(extra, model.hf_text_config.num_hidden_layers, len(new.prompt_token_ids or ()))
            if asked is not None:
                RECORDER.asked[new.req_id] = asked
        for name in scheduler_output.finished_req_ids:
            RECORDER.asked.pop(name, None)
        runner = self.model_runner
        RECORDER.batch = lambda: [(name, runner.requests[name].num_tokens) for name in runner.input_batch.req_ids]
        try:
            return super().execute_model(scheduler_output)
        finally:
            RECORDER.batch = None
            RECORDER.finish()
