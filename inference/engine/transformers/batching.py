"""Our side of transformers' continuous batching loop.

The library runs one thread: drain the queues, schedule a batch, forward, take
the arg max, deliver. These classes stand at its seams, all of them called in
that thread:

==================  =========================================================
``FairScheduler``   (``scheduler.py``) what goes into a step; when a cancel is done
``SamplerBridge``   our sampler in the place of the library's logits processors
``StepRouter``      one hand-over to the event loop for everything a step produced
``SplitRunner``     CUDA graphs of the forward pass alone, sampling after each replay
==================  =========================================================

They rely on names of the library that it does not document, which is why its
version is pinned; ``tests/engine`` fails where an upgrade moves one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState
from transformers.generation.continuous_batching.utils import stream_context
from transformers.generation.logits_process import LogitsProcessorList

from inference.engine.base import EngineOutput
from inference.engine.transformers.generation import Generation, Registry
from inference.engine.transformers.sampler import Sampler
from inference.engine.transformers.scheduler import StepLog

Delivery = tuple[Generation, EngineOutput]


class SamplerBridge(ContinuousBatchingLogitsProcessorList):
    """Runs our sampler where the library would run its own processors.

    Args:
        processes: the library's helper for several processes with one model.
    """

    def __init__(self, sampler: Sampler, registry: Registry, processes: Any) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self._processes = processes
        self._sampler = sampler
        self._registry = registry
        self._rows: list[Generation | None] = []

    def prepare_tensor_args(self, requests_in_batch: Sequence[Any], arg_storage: Tensor) -> Tensor:
        get = self._registry.get
        self._rows = [get(r.state.request_id) for r in requests_in_batch if r.has_new_token]
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        self._sampler(scores, self._rows)
        if self._processes.tp_size > 1:
            # Only the first process knows the requests; the others take the tokens it chose.
            chosen = self._processes.tp_broadcast_from_rank_0(scores.argmax(dim=-1, keepdim=True))
            scores.scatter_(1, chosen, float("inf"))
        return scores


class StepRouter(OutputRouter):
    """Turns what a step delivers into engine outputs and hands them over in one call.

    Args:
        receive: runs in the event loop's thread with everything one step produced.
        cancel: cancels a key in the loop; may be called from any thread.
        ending: whether the loop is about to end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None,
        registry: Registry,
        log: StepLog,
        receive: Callable[[list[Delivery]], None],
        cancel: Callable[[str], None],
        ending: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._ending = ending
        self._loop = loop
        self._registry = registry
        self._log = log
        self._receive = receive
        self._cancel = cancel

    def fail_and_deliver(self, state: RequestState, error: Exception) -> None:
        # A loop that ends fails whatever it still holds. That is not the end of those requests: the engine
        # dies with its loop, and they go on with another worker. Said here, it could reach a client before that.
        if not self._ending():
            super().fail_and_deliver(state, error)

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        deliveries: list[Delivery] = []
        for output in outputs:
            generation = self._registry.get(output.request_id)
            if generation is None or generation.done:
                continue
            made = self._convert(generation, output)
            if made is not None:
                deliveries.append((generation, made))
        if deliveries:
            self.post(self._receive, deliveries)

    def post(self, function: Callable[[Any], None], argument: Any) -> None:
        """Run a function in the event loop's thread, unless there is none or it is gone already."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function, argument)
        except RuntimeError:
            return  # the process is on its way out; nobody is left to tell

    def _convert(self, generation: Generation, output: GenerationOutput) -> EngineOutput | None:
        request_id = generation.job.id
        generation.ended = output.is_finished()
        if output.error is not None and generation.error is None:
            generation.error = output.error
        ids = output.generated_tokens[generation.emitted :]
        first = generation.emitted == 0
        generation.emitted += len(ids)
        self._log.generated_tokens += len(ids)
        if generation.error is None:
            for token in ids:
                generation.accept(token)
        if generation.error is not None:
            generation.done = True
            if not generation.ended:
                self._cancel(generation.key)
            return EngineOutput(request_id, [], finish="error", error=generation.error)
        finish = generation.ending() if generation.ended else None
        generation.done = finish is not None
        if not ids and not finish:
            return None
        logprobs, generation.logprobs = generation.logprobs, []
        stopped = finish == "stop"
        return EngineOutput(
            request_id,
            ids,
            logprobs=logprobs if generation.params.logprobs is not None else None,
            finish=finish,
            hidden=int(stopped),
            cached=generation.cached if first else 0,
            stop_match=ids[-1] if stopped and ids[-1] in generation.params.stop_token_ids else None,
        )


class SplitRunner(ModelRunner):
    """Captures only the forward pass in CUDA graphs and samples after each replay.

    A graph replays kernels, not Python, so a sampler inside it would go on with
    the parameters of the batch that was captured. Outside it every request keeps
    its own.
    """

    def __init__(self, original: ModelRunner, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(
            logit_processor=original.logit_processor,
            cb_config=original.cb_config,
            inputs_and_outputs=original.inputs_and_outputs,
            cache=original.cache,
            do_sample=False,
            return_logprobs=False,
        )
        self._logits = torch.zeros((max_rows, vocab_size), dtype=torch.float32, device=device)

    def compute_batch(self, model: Any, batch_data: dict[str, Any]) -> None:
        super().compute_batch(model, batch_data)
        rows = batch_data["logits_indices"].size(0)
        with stream_context(self.inputs_and_outputs.compute_stream):
            scores = self._logits[:rows]
            self.logit_processor(None, scores, batch_data["logits_processor_args"])
            self._sample(scores.unsqueeze(0), self.inputs_and_outputs.get_cb_kwargs()[2])

    def _forward_process_and_sample(
        self, model: Any, batch_data: dict[str, Any], carry_over_ids: Tensor, prev_ids: Tensor, output_ids: Tensor
    ) -> None:
        logits = model(**batch_data).logits
        if "logits_to_keep" not in batch_data:
            logits = logits[:, batch_data["logits_indices"], :]
        self._logits[: logits.shape[1]].copy_(logits[0])
