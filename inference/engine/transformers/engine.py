"""The engine on transformers' continuous batching.

Two threads share it. The event loop's thread owns admission: which sequences
live, what they have reserved, what reaches the sink. The library's generation
thread owns the batch: scheduling, the forward pass, sampling. They meet in the
library's queues and in ``call_soon_threadsafe``, once per step.

Admission keeps a budget of the cache. The library ends its loop, with all
requests in it, when one request can never fit, so that is refused first. Each
sequence holds a reservation for its prompt and the next stretch of its answer,
renewed ahead of need: an answer rarely uses all of its ``max_tokens``, and with
the default (what is left of the context) a few requests would book the whole
cache. Where many answers grow long together after all, the library sets the
newest back, recomputes it later, and the client sees a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

from inference.config import Config
from inference.engine.base import Died, EngineOutput, Sink
from inference.engine.transformers.batching import Delivery, SamplerBridge, SplitRunner, StepRouter
from inference.engine.transformers.generation import Generation, Registry
from inference.engine.transformers.grammar import GrammarCompiler
from inference.engine.transformers.loading import greedy_config, load_model, set_cpu_threads
from inference.engine.transformers.sampler import Sampler
from inference.engine.transformers.scheduler import Pace, StepLog
from inference.engine.transformers.sizing import batching_config
from inference.errors import EngineDied, ModelUnavailable, Overloaded, TooLarge
from inference.messages import EngineStats, Job, ModelInfo, SamplingParams

logger = logging.getLogger("sluice.engine")

STRETCH = 512
"""Answer tokens that a sequence reserves ahead."""
RENEW_BELOW = 64
"""Tokens left of a reservation at which the next stretch is reserved."""
STOP_TIMEOUT = 30.0
"""Seconds that closing waits for the generation thread."""


class TransformersEngine:
    """An :class:`~inference.engine.base.Engine` on one device.

    Args:
        folder: a model folder (config, weights, tokenizer).
        alias: public name of the model.
        device: ``cpu``, ``cuda:0`` ...
        config: takes ``dtype``, ``max_running``, ``cache_tokens``,
            ``prefill_budget``, ``context_length`` and ``workers_per_device`` from it.
    """

    def __init__(self, folder: str, *, alias: str, device: str, config: Config) -> None:
        self.alias = alias
        self._folder = folder
        self._device = torch.device(device)
        self._config = config
        self._slots = config.max_running
        self._log = StepLog()
        self._registry = Registry()
        self._live: dict[str, Generation] = {}
        self._leaving: dict[str, Generation] = {}
        self._reserved = 0
        self._numbers = itertools.count(1)
        self._compilers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._closing = False
        self._sink: Sink = lambda outputs: None
        self._died: Died = lambda error: None

    # Life of the engine

    async def load(self, sink: Sink, died: Died) -> ModelInfo:
        """See :meth:`inference.engine.base.Engine.load`."""
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.to_thread(self._open)
            await self._warm_up()
        except BaseException:
            await self.close()
            raise
        self._sink, self._died = sink, died
        return ModelInfo(
            alias=self.alias,
            engine="transformers",
            context_length=self._loaded.context_length,
            capacity_tokens=self._capacity_tokens,
            slots=self._slots,
        )

    def _open(self) -> None:
        """Load the weights, allocate the cache, start the loop. Blocks."""
        if self._device.type == "cpu":
            set_cpu_threads(self._config)
        self._loaded = loaded = load_model(self._folder, self._device, self._config)
        self._grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, sorted(loaded.eos_ids))
        with torch.inference_mode():
            self._manager = manager = loaded.model.init_continuous_batching(
                greedy_config(), batching_config(loaded, self._device, self._config)
            )
            manager.logit_processor = SamplerBridge(Sampler(self._device), self._registry)
            manager.output_router = self._router = StepRouter(
                self._loop, self._registry, self._log, self._on_step, manager.cancel_request
            )
            try:
                manager.batch_processor = processor = manager._create_batch_processor()
            except (MemoryError, ValueError, RuntimeError) as error:
                raise ModelUnavailable(f"{self.alias}: no room for the cache: {error}") from error
            self._cache = processor.cache
            if any(processor.cb_config.cuda_graph_booleans):
                rows = processor.cb_config.max_requests_per_batch
                processor.model_runner = SplitRunner(processor.model_runner, rows, loaded.vocab_size, self._device)
            processor.scheduler.attach(
                self._registry,
                Pace(self._config.prefill_budget),
                self._log,
                lambda keys: self._router.post(self._on_cancelled, keys),
            )
            self._units_total = self._cache.num_sectors
            self._capacity_tokens = infer_max_single_request_tokens(self._cache)
            manager.warmup()
            manager.start()
        # The library's thread is not a daemon, and ends without telling anybody.
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    async def _warm_up(self) -> None:
        """Generate with and without sampling, so that the first request finds everything paged in."""
        done = asyncio.Event()
        left = {"warm-up-greedy", "warm-up-sampled"}

        def sink(outputs: Sequence[EngineOutput]) -> None:
            left.difference_update(output.id for output in outputs if output.finish)
            if not left:
                done.set()

        def died(error: BaseException) -> None:
            done.set()

        self._sink, self._died = sink, died
        length = max(1, min(self._config.prefill_budget, self.capacity - 8, 256))
        for name, temperature in zip(sorted(left), (0.0, 1.0), strict=True):
            params = SamplingParams(max_tokens=4, temperature=temperature, seed=1, ignore_eos=True)
            self.submit(Job(name, self.alias, [1] * (length if not temperature else 4), params))
            if self._slots < 2:
                left.discard("warm-up-sampled")
                break
        await done.wait()
        if self._failure is not None:
            raise ModelUnavailable(f"{self.alias}: the warm-up failed: {self._failure}") from self._failure
        self._log.reset()  # the warm-up is not part of the statistics

    async def close(self) -> None:
        """See :meth:`inference.engine.base.Engine.close`."""
        self._closing = True
        self._sink = lambda outputs: None
        for task in list(self._tasks):
            task.cancel()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        manager, self._manager = getattr(self, "_manager", None), None
        if manager is not None:
            await asyncio.to_thread(_stop, manager)
        for generation in list(itertools.chain(self._live.values(), self._leaving.values())):
            generation.closed = True
            self._release(generation)

    def _watch(self) -> None:
        """In a thread of its own: wait for the generation thread to end, for whatever reason."""
        manager = self._manager
        thread = manager._generation_thread if manager is not None else None
        if thread is None:
            return
        thread.join()
        self._router.post(self._on_loop_end, manager.background_thread_status.fatal_error)

    def _on_loop_end(self, error: BaseException | None) -> None:
        if self._closing or self._failure is not None:
            return
        self._failure = EngineDied(f"the generation loop of {self.alias} ended: {error or 'no reason given'}")
        self._failure.__cause__ = error
        self._died(self._failure)

    # Admission

    @property
    def capacity(self) -> int:
        """Longest prompt plus answer that can be served, tokens."""
        return min(self._capacity_tokens, self._loaded.context_length)

    def submit(self, job: Job, resumed: Sequence[int] = ()) -> None:
        """See :meth:`inference.engine.base.Engine.submit`."""
        self._check_alive()
        need = len(job.prompt_ids) + job.params.max_tokens
        if need > self.capacity:
            raise TooLarge(
                f"{len(job.prompt_ids)} prompt tokens and {job.params.max_tokens} to generate are {need} tokens; "
                f"{self.alias} takes at most {self.capacity}"
            )
        self.abort(job.id)  # an earlier attempt of the same request, if any, is void
        if not self.fits(job, len(resumed)):
            raise Overloaded(f"{self.alias} has no free slot")
        generation = Generation(
            f"{next(self._numbers)}:{job.id}",
            job,
            resumed,
            eos_ids=self._loaded.eos_ids,
            vocab_size=self._loaded.vocab_size,
        )
        self._live[job.id] = generation
        self._reserve(generation)
        problem = self._problem(job, resumed)
        ending = generation.ending()
        if problem or ending:
            output = EngineOutput(job.id, [], finish="error" if problem else ending, error=problem)
            self._loop.call_soon(self._on_step, [(generation, output)])
        elif job.params.grammar is not None:
            task = self._loop.create_task(self._start_constrained(generation), name=f"grammar-{job.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            try:
                self._start(generation)
            except EngineDied:
                del self._live[job.id]
                self._release(generation)
                raise

    def _problem(self, job: Job, resumed: Sequence[int]) -> str | None:
        """What makes this job alone impossible; an id outside the vocabulary would end the whole loop."""
        if not job.prompt_ids:
            return "The prompt is empty."
        ids = (min(job.prompt_ids), max(job.prompt_ids), *resumed)
        if min(ids) < 0 or max(ids) >= self._loaded.vocab_size:
            return "The prompt holds a token id that this model does not have."
        return None

    async def _start_constrained(self, generation: Generation) -> None:
        """Compile the grammar off the event loop, then start."""
        grammar, tokens = generation.params.grammar, list(generation.tokens)
        assert grammar is not None
        try:
            generation.matcher = await self._loop.run_in_executor(
                self._compilers, self._grammars.matcher, grammar, tokens
            )
            if not generation.closed:
                self._start(generation)
        except (ValueError, EngineDied) as error:
            self._on_step([(generation, _failed(generation.job, str(error)))])
        except Exception:
            # The edge of this task: whatever went wrong in the library, the request must end.
            logger.exception("Compiling a grammar failed", extra={"request": generation.job.id})
            self._on_step([(generation, _failed(generation.job, "The grammar could not be compiled."))])

    def _start(self, generation: Generation) -> None:
        self._check_alive()
        assert self._manager is not None
        self._registry.add(generation)
        generation.started = True
        accepted = self._manager.add_request(
            [*generation.job.prompt_ids, *generation.tokens],
            request_id=generation.key,
            max_new_tokens=generation.params.max_tokens - generation.prior,
            streaming=True,
            eos_token_id=sorted(generation.stop_ids) or [-1],
        )
        if accepted is None:
            raise EngineDied(f"the generation loop of {self.alias} takes no more requests")
        self._log.prompt_tokens += len(generation.job.prompt_ids)

    def abort(self, request_id: str) -> None:
        """See :meth:`inference.engine.base.Engine.abort`."""
        generation = self._live.pop(request_id, None)
        if generation is None:
            return
        generation.closed = True
        if generation.started and self._manager is not None:
            self._leaving[generation.key] = generation
            self._manager.cancel_request(generation.key)
        else:
            self._release(generation)

    def free_slots(self) -> int:
        """See :meth:`inference.engine.base.Engine.free_slots`."""
        if self._failure is not None or self._closing:
            return 0
        return max(0, self._slots - len(self._live) - len(self._leaving))

    def fits(self, job: Job, resumed: int = 0) -> bool:
        """See :meth:`inference.engine.base.Engine.fits`. ``resumed`` ids are part of ``max_tokens``."""
        return (
            self.free_slots() > 0
            and len(job.prompt_ids) + job.params.max_tokens <= self.capacity
            and self._reserved + self._units(_ahead(job, resumed)) <= self._units_total
        )

    def _reserve(self, generation: Generation) -> None:
        """Book the next stretch of an answer; what is booked is given back by ``_release`` alone."""
        generation.room = _ahead(generation.job, len(generation.tokens))
        units = self._units(generation.room)
        self._reserved += units - generation.units
        generation.units = units

    def _units(self, tokens: int) -> int:
        """Cache sectors that a sequence of so many tokens can come to occupy."""
        total = 0
        for allocator in self._cache.cache_allocators.values():
            total += -(-allocator.needs_new_blocks("", 0, tokens) // allocator.blocks_per_sector)
        return total

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDied(str(self._failure)) from self._failure
        if self._closing:
            raise EngineDied(f"the engine of {self.alias} is closed")

    # What the generation thread reports

    def _on_step(self, deliveries: list[Delivery]) -> None:
        outputs: list[EngineOutput] = []
        for generation, output in deliveries:
            if generation.closed:
                if generation.ended:  # by itself, while its cancel was on the way
                    self._release(generation)
                continue
            if output.cached:
                self._log.cached_prompt_tokens += output.cached
            if output.finish:
                self._finish(generation, output.finish)
            elif generation.room - generation.length < RENEW_BELOW:
                self._reserve(generation)
            outputs.append(output)
        if outputs:
            self._sink(outputs)

    def _finish(self, generation: Generation, finish: str) -> None:
        del self._live[generation.job.id]
        generation.closed = True
        if finish == "error" and generation.started and not generation.ended:
            self._leaving[generation.key] = generation  # until the loop has taken its cancel
        else:
            self._release(generation)

    def _on_cancelled(self, keys: list[str]) -> None:
        for key in keys:
            generation = self._leaving.get(key)
            if generation is not None:
                self._release(generation)

    def _release(self, generation: Generation) -> None:
        """Give back everything that a sequence holds; the one way out for every ending."""
        if generation.released:
            return
        generation.released = True
        self._leaving.pop(generation.key, None)
        self._registry.discard(generation.key)
        self._reserved -= generation.units
        generation.matcher = None

    # Views

    def stats(self) -> EngineStats:
        """See :meth:`inference.engine.base.Engine.stats`."""
        log = self._log
        total, free, cached = self._blocks()
        waiting = sum(1 for g in self._live.values() if not g.emitted)
        return EngineStats(
            running=len(self._live) + len(self._leaving) - waiting,
            waiting=waiting,
            slots=self._slots,
            blocks_total=total,
            blocks_used=total - free - cached,
            blocks_cached=cached,
            steps=log.steps,
            step_seconds=log.step_seconds,
            last_step_seconds=log.last_step_seconds,
            prompt_tokens=log.prompt_tokens,
            cached_prompt_tokens=log.cached_prompt_tokens,
            generated_tokens=log.generated_tokens,
        )

    def _blocks(self) -> tuple[int, int, int]:
        """Cache blocks: all, free, and kept only in case a prompt shares them."""
        if not hasattr(self, "_cache"):
            return 0, 0, 0
        total = self._cache.num_blocks
        size = self._cache.num_sectors * self._cache.bytes_per_sector / total
        cached = sum(len(a.ledger.cached_blocks) * a.bytes_per_block for a in self._cache.cache_allocators.values())
        free = int(self._cache.compute_free_capacity(relative=False) / size)
        return total, free, round(cached / size)


def _failed(job: Job, error: str) -> EngineOutput:
    return EngineOutput(job.id, [], finish="error", error=error)


def _ahead(job: Job, generated: int) -> int:
    """Length that a sequence reserves cache for, tokens, when so much of its answer is there."""
    return len(job.prompt_ids) + min(job.params.max_tokens, generated + STRETCH)


def _stop(manager: Any) -> None:
    """Stop the generation thread now; it is in the middle of a step at most."""
    with contextlib.suppress(RuntimeError):
        manager.stop(block=True, timeout=STOP_TIMEOUT, hard_stop=True)
        manager.destroy()
