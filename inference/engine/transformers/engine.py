"""The engine on transformers' continuous batching.

Two threads share it. The event loop's thread owns admission: which sequences
live, what they have reserved (``admission.py``), what reaches the sink. The
library's generation thread (``loop.py``) owns the batch: scheduling, the
forward pass, sampling. They meet in the library's queues and in
``call_soon_threadsafe``, once per step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from inference.config import Config
from inference.engine.base import Died, EngineOutput, Sink
from inference.engine.transformers.admission import Admission
from inference.engine.transformers.batching import Delivery
from inference.engine.transformers.gathering import Gathering
from inference.engine.transformers.generation import Generation, Registry
from inference.engine.transformers.grammar import GrammarCompiler
from inference.engine.transformers.loading import check_devices, load_model, set_cpu_threads
from inference.engine.transformers.loop import BatchingLoop
from inference.engine.transformers.packing import pack_linear_layers
from inference.engine.transformers.parallel import Group
from inference.engine.transformers.scheduler import StepLog
from inference.errors import EngineDied, ModelUnavailable, Overloaded, TooLarge
from inference.messages import EngineStats, Job, ModelInfo, SamplingParams

logger = logging.getLogger("sluice.engine")


class TransformersEngine:
    """An :class:`~inference.engine.base.Engine` on one device, or on several that share the model.

    Args:
        folder: a model folder (config, weights, tokenizer).
        alias: public name of the model.
        device: ``cpu``, ``cuda:0``, ``cuda:0+cuda:1`` ...
        config: takes ``dtype``, ``max_running``, ``cache_tokens``,
            ``prefill_budget``, ``context_length`` and ``workers_per_device`` from it.
    """

    def __init__(self, folder: str, *, alias: str, device: str, config: Config) -> None:
        self.alias = alias
        self._folder = folder
        self._group = Group(folder, alias, device.split("+"), config)
        self._device = torch.device(self._group.devices[0])
        self._config = config
        self._log = StepLog()
        self._registry = Registry()
        self._batching: BatchingLoop | None = None
        self._admission: Admission | None = None
        self._gathering = Gathering(self._start_all, lambda: self._batching_loop.usual_step)
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
        check_devices(self._group.devices)
        try:
            self._group.start(lambda error: self._on_partner_end(error, died))
            # A thread of its own that ends: one that stays keeps its OpenMP team, and with more teams than
            # cores the teams no longer spin between their parallel regions, which costs a fifth of every step.
            with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as loader:
                await self._loop.run_in_executor(loader, self._open)
            await self._warm_up()
        except BaseException:  # also a cancellation: an engine that was not loaded keeps no threads or processes
            await self.close()
            raise
        self._sink, self._died = sink, died
        assert self._admission is not None
        return ModelInfo(
            alias=self.alias,
            engine="transformers",
            context_length=self._loaded.context_length,
            capacity_tokens=self._batching_loop.longest,
            slots=self._admission.slots,
            suggested=self._loaded.suggested,
        )

    def _open(self) -> None:
        """Load the weights, allocate the cache, start the loop. Blocks."""
        if self._device.type == "cpu":
            set_cpu_threads(self._config, len(self._group.devices))
        self._loaded = loaded = load_model(self._folder, self._device, self._config, ranks=len(self._group.devices))
        if self._device.type == "cpu" and len(self._group.devices) == 1:  # a shared layer talks to its other parts
            pack_linear_layers(loaded.model)
        self._grammars = GrammarCompiler(loaded.tokenizer, loaded.vocab_size, sorted(loaded.eos_ids))
        self._batching = batching = BatchingLoop(
            self.alias,
            loaded,
            self._device,
            self._config,
            registry=self._registry,
            log=self._log,
            receive=self._on_step,
            cancelled=self._on_cancelled,
            events=self._loop,
            ranks=len(self._group.devices),
        )
        longest = min(batching.longest, loaded.context_length)
        self._admission = Admission(self._registry, self._config.max_running, batching.cache, longest)
        batching.start(self._on_loop_end)

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
            if self._config.max_running < 2:
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
        self._gathering.stop()
        self._compilers.shutdown(wait=False, cancel_futures=True)
        batching, self._batching = self._batching, None
        if batching is not None:
            await asyncio.to_thread(batching.stop)
        await asyncio.to_thread(self._group.stop)
        for generation in self._admission or ():
            generation.closed = True
            self._admitted.release(generation)

    def _on_loop_end(self, error: BaseException | None) -> None:
        if self._closing or self._failure is not None:
            return
        self._failure = EngineDied(f"the generation loop of {self.alias} ended: {error or 'no reason given'}")
        self._failure.__cause__ = error
        self._died(self._failure)

    def _on_partner_end(self, error: EngineDied, died: Died) -> None:
        """A process that shares the model has ended: this one waits for it in vain, perhaps still loading."""
        if not self._closing and self._failure is None:
            self._failure = error
            if self._died is not died:
                self._died(error)  # ends a warm-up
            died(error)

    # Admission

    @property
    def _admitted(self) -> Admission:
        assert self._admission is not None, "load() comes first"
        return self._admission

    @property
    def _batching_loop(self) -> BatchingLoop:
        assert self._batching is not None, "load() comes first"
        return self._batching

    @property
    def capacity(self) -> int:
        """Longest prompt plus answer that can be served, tokens."""
        return self._admitted.longest

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
        generation = Generation(job, resumed, eos_ids=self._loaded.eos_ids, vocab_size=self._loaded.vocab_size)
        self._admitted.enter(generation)
        problem = self._problem(job, resumed)
        ending = generation.ending()
        if problem or ending:
            output = EngineOutput(job.id, [], finish="error" if problem else ending, error=problem)
            self._loop.call_soon(self._on_step, [(generation, output)])
        elif job.params.grammar is not None:
            task = self._loop.create_task(self._start_constrained(generation), name=f"grammar-{job.id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif self._gathering.open or self._admitted.alone(generation):
            self._gathering.add(generation)
        else:
            try:
                self._start(generation)
            except EngineDied:
                self._admitted.leave(generation, still_held=False)
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
        except ValueError as error:
            self._on_step([(generation, _failed(generation.job, str(error)))])
        except Exception:
            # The edge of this task: whatever went wrong in the library, the request must end.
            logger.exception("Compiling a grammar failed", extra={"request": generation.job.id})
            self._on_step([(generation, _failed(generation.job, "The grammar could not be compiled."))])
        else:
            self._start_all([generation])

    def _start_all(self, generations: list[Generation]) -> None:
        """Start those that have waited, and that nobody has cancelled meanwhile."""
        for generation in generations:
            if generation.closed:
                continue
            try:
                self._start(generation)
            except EngineDied:
                return  # so does the worker: what it holds goes on elsewhere
            except Exception:
                # The edge of a task or a timer: whatever went wrong in the library, this request must end.
                logger.exception("A sequence could not be started", extra={"request": generation.job.id})
                self._on_step([(generation, _failed(generation.job, "The sequence could not be started."))])

    def _start(self, generation: Generation) -> None:
        self._check_alive()
        if not self._batching_loop.add(generation):
            raise EngineDied(f"the generation loop of {self.alias} takes no more requests")
        self._log.prompt_tokens += len(generation.job.prompt_ids)

    def abort(self, request_id: str) -> None:
        """See :meth:`inference.engine.base.Engine.abort`."""
        generation = self._admission.live.get(request_id) if self._admission is not None else None
        if generation is None:
            return
        held = generation.started and self._batching is not None
        self._admitted.leave(generation, still_held=held)
        if held:
            self._batching_loop.cancel(generation.key)

    def free_slots(self) -> int:
        """See :meth:`inference.engine.base.Engine.free_slots`."""
        if self._failure is not None or self._closing or self._admission is None:
            return 0
        return self._admission.free_slots()

    def fits(self, job: Job, resumed: int = 0) -> bool:
        """See :meth:`inference.engine.base.Engine.fits`. ``resumed`` ids are part of ``max_tokens``."""
        return self.free_slots() > 0 and self._admitted.fits(job, resumed)

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
                    self._admitted.release(generation)
                continue
            if output.cached:
                self._log.cached_prompt_tokens += output.cached
            if output.finish:
                # One that fails is with the batching loop until that has taken its cancel.
                held = output.finish == "error" and generation.started and not generation.ended
                self._admitted.leave(generation, still_held=held)
            else:
                self._admitted.renew(generation)
            outputs.append(output)
        if outputs:
            self._sink(outputs)

    def _on_cancelled(self, keys: list[str]) -> None:
        for key in keys:
            generation = self._admitted.leaving.get(key)
            if generation is not None:
                self._admitted.release(generation)

    # Views

    def stats(self) -> EngineStats:
        """See :meth:`inference.engine.base.Engine.stats`."""
        log, book = self._log, self._admission
        total, free, cached = self._batching.blocks() if self._batching is not None else (0, 0, 0)
        waiting = book.waiting() if book is not None else 0
        return EngineStats(
            running=len(book.live) + len(book.leaving) - waiting if book is not None else 0,
            waiting=waiting,
            slots=self._config.max_running,
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


def _failed(job: Job, error: str) -> EngineOutput:
    return EngineOutput(job.id, [], finish="error", error=error)
