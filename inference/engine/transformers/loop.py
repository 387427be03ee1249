"""The library's batching loop with our parts in it: opened, fed, watched, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable

import torch
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

from inference.config import Config
from inference.engine.transformers.batching import Delivery, SamplerBridge, SplitRunner, StepRouter
from inference.engine.transformers.generation import Generation, Registry
from inference.engine.transformers.loading import Loaded, greedy_config
from inference.engine.transformers.sampler import Sampler
from inference.engine.transformers.scheduler import Pace, StepLog
from inference.engine.transformers.sizing import batching_config
from inference.errors import ModelUnavailable

STOP_TIMEOUT = 30.0
"""Seconds that stopping waits for the generation thread."""


class BatchingLoop:
    """One loop over one model; the constructor allocates the cache and blocks.

    Where several processes share a model, each runs this, and all of them make
    the same decisions: the library hands new requests and cancels from the
    first to the others, and our parts do so with what only the first can know
    (see ``parallel.py``).

    Args:
        receive: takes what a step delivers, in the thread of ``events``.
        cancelled: takes the keys whose cancel is done, in the thread of ``events``.
        events: ``None`` in a process that nobody asks for anything.
        ranks: processes that share the model.

    Raises:
        ModelUnavailable: there is no room for the cache.
    """

    def __init__(
        self,
        alias: str,
        loaded: Loaded,
        device: torch.device,
        config: Config,
        *,
        registry: Registry,
        log: StepLog,
        receive: Callable[[list[Delivery]], None],
        cancelled: Callable[[list[str]], None],
        events: asyncio.AbstractEventLoop | None,
        ranks: int = 1,
    ) -> None:
        self._registry = registry
        self._numbers = itertools.count(1)
        with torch.inference_mode():
            self.manager = manager = loaded.model.init_continuous_batching(
                greedy_config(), batching_config(loaded, device, config, ranks=ranks)
            )
            manager.logit_processor = SamplerBridge(Sampler(device), registry, manager.distributed_helper)
            status = manager.background_thread_status
            manager.output_router = router = StepRouter(
                events,
                registry,
                log,
                receive,
                cancel=manager.cancel_request,
                ending=lambda: status.local_status >= status.HARD_STOP,
            )
            try:
                manager.batch_processor = processor = manager._create_batch_processor()
            except (MemoryError, ValueError, RuntimeError) as error:
                raise ModelUnavailable(f"{alias}: no room for the cache: {error}") from error
            self.cache = processor.cache
            if any(processor.cb_config.cuda_graph_booleans):
                rows = processor.cb_config.max_requests_per_batch
                processor.model_runner = SplitRunner(processor.model_runner, rows, loaded.vocab_size, device)
            self._pace = Pace(config.prefill_budget)
            processor.scheduler.attach(
                registry,
                self._pace,
                log,
                lambda keys: router.post(cancelled, keys),
                manager.distributed_helper,
            )
            self.longest: int = infer_max_single_request_tokens(self.cache)
            """Tokens of the longest sequence that the cache can hold."""
            self._router = router

    def start(self, on_end: Callable[[BaseException | None], None]) -> None:
        """Start the generation thread; ``on_end`` hears of its end in the event loop's thread."""
        with torch.inference_mode():
            self.manager.warmup()
            self.manager.start()
        # The library's thread is not a daemon, and ends without telling anybody.
        thread = self.manager._generation_thread

        def watch() -> None:
            thread.join()
            self._router.post(on_end, self.manager.background_thread_status.fatal_error)

        threading.Thread(target=watch, name="engine-watch", daemon=True).start()

    def join(self) -> BaseException | None:
        """Wait until the loop has ended; what ended it, if that was an error."""
        self.manager._generation_thread.join()
        error: BaseException | None = self.manager.background_thread_status.fatal_error
        return error

    @property
    def usual_step(self) -> float:
        """Seconds of a step that only decodes; 0 where none has been yet."""
        return self._pace.decode_seconds

    def add(self, generation: Generation) -> bool:
        """Queue a sequence under a key of its own; false where the loop takes no more.

        Keys are numbered in the order of the queue, so that a second attempt of
        a request never meets remains of the first, and a cancel that overtakes
        its request is known for one.
        """
        generation.key = f"{next(self._numbers)}:{generation.job.id}"
        generation.started = True
        self._registry.add(generation)
        try:
            accepted = self.manager.add_request(
                [*generation.job.prompt_ids, *generation.tokens],
                request_id=generation.key,
                max_new_tokens=generation.params.max_tokens - generation.prior,
                streaming=True,
                eos_token_id=sorted(generation.stop_ids) or [-1],
            )
        except BaseException:  # whatever the library raises: it does not have the sequence
            generation.started = False
            self._registry.discard(generation.key)
            raise
        return accepted is not None

    def cancel(self, key: str) -> None:
        """Drop a sequence at the next step; ``cancelled`` says when that is done."""
        self.manager.cancel_request(key)

    def stop(self) -> None:
        """Stop the generation thread now; it is in the middle of a step at most. Blocks."""
        with contextlib.suppress(RuntimeError):
            self.manager.stop(block=True, timeout=STOP_TIMEOUT, hard_stop=True)
            self.manager.destroy()

    def blocks(self) -> tuple[int, int, int]:
        """Cache blocks: all, free, and kept only in case a prompt shares them."""
        total = self.cache.num_blocks
        size = self.cache.num_sectors * self.cache.bytes_per_sector / total
        cached = sum(len(a.ledger.cached_blocks) * a.bytes_per_block for a in self.cache.cache_allocators.values())
        free = int(self.cache.compute_free_capacity(relative=False) / size)
        return total, free, round(cached / size)
