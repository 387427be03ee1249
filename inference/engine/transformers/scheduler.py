"""What goes into each step of the batching loop. Runs in the generation thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from inference.engine.transformers.generation import Registry

SCHEDULER_TYPE = "sluice"
"""Name under which the library finds the scheduler."""
LONGEST_PAUSE = 4
"""A step that also prefills takes at most this many usual decode steps."""


class Pace:
    """How many prompt tokens a step may take in while others are streaming.

    Learns the time of a step that only decodes and of each prompt token on top,
    and keeps a mixed step within ``LONGEST_PAUSE`` usual ones.

    Args:
        budget: most prompt tokens per step, ever.

    Attributes:
        decode_seconds: a usual step that only decodes; 0 where none has been yet.
    """

    _LEAST = 16
    _FIRST = 64
    _WEIGHT = 0.2

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decode_seconds = 0.0
        self._token_seconds = 0.0

    def chunk(self, decoding: int) -> int:
        """Prompt tokens for the next step beside ``decoding`` sequences."""
        if not decoding:
            return self.budget
        if not self.decode_seconds or not self._token_seconds:
            return min(self._FIRST, self.budget)
        fitting = int((LONGEST_PAUSE - 1) * self.decode_seconds / self._token_seconds)
        return max(min(fitting, self.budget), min(self._LEAST, self.budget))

    def learn(self, decoding: int, prefilled: int, seconds: float) -> None:
        """Take in a finished step."""
        if not prefilled:
            self.decode_seconds = self._mean(self.decode_seconds, seconds)
        elif prefilled >= self._LEAST:
            spent = seconds - (self.decode_seconds if decoding else 0.0)
            self._token_seconds = self._mean(self._token_seconds, max(spent, 1e-6) / prefilled)

    def _mean(self, old: float, new: float) -> float:
        return old + self._WEIGHT * (new - old) if old else new


class StepLog:
    """Counters that the generation thread writes and anybody may read."""

    def __init__(self) -> None:
        #: Steps that have begun before do not count: one may be under way while the counters begin anew.
        self.since = time.perf_counter()
        self.steps = 0
        self.step_seconds = 0.0
        self.last_step_seconds = 0.0
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generated_tokens = 0

    def reset(self) -> None:
        """Start counting anew."""
        self.__init__()  # type: ignore[misc]


class FairScheduler(FIFOScheduler):
    """Decoding sequences first, then prefills, with turns between short and long ones.

    The library's FIFO order lets one long prompt take every step's whole
    prefill budget until it is done. Here every other step serves the prompt
    with the least left to do, so that a short request overtakes a long one,
    and the steps between serve the oldest, so that none starves.
    """

    registry: Registry
    pace: Pace
    log: StepLog
    on_cancelled: Callable[[list[str]], None]
    _requests_to_cancel: set[str]

    def attach(
        self,
        registry: Registry,
        pace: Pace,
        log: StepLog,
        on_cancelled: Callable[[list[str]], None],
        processes: Any,
    ) -> None:
        """Connect to the engine; must happen before the loop starts.

        Args:
            processes: the library's helper for several processes with one model.
        """
        self.registry, self.pace, self.log, self.on_cancelled = registry, pace, log, on_cancelled
        self._processes = processes
        self._open_step: tuple[float, int, int] | None = None
        self._turn = 0
        self._newest = 0

    def add_waiting_request(self, state: RequestState) -> None:
        self._newest = max(self._newest, _number(state.request_id))
        super().add_waiting_request(state)

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Called by the loop before each step, also while idle: the boundary between steps."""
        self._close_step()
        if not self._requests_to_cancel:
            return []
        wanted = sorted(self._requests_to_cancel, key=_number)
        states: list[RequestState] = []
        for key in wanted:  # in an order that is the same in every process of a group
            self._requests_to_cancel = {key}
            states += super().clear_cancelled_requests()
        # The queues are drained one after the other: a cancel may arrive before its request.
        self._requests_to_cancel = {key for key in wanted if _number(key) > self._newest}
        if states:
            self.block_new_requests = False
            self.on_cancelled([state.request_id for state in states])
        return states

    def _prefill_chunk(self, decoding: int, *, needed: bool) -> int:
        """Prompt tokens for the next step; every process of a group goes by the first one's clock."""
        chunk = self.pace.chunk(decoding)
        if needed and decoding and self._processes.tp_size > 1:
            chunk = self._processes.tp_broadcast_object_from_rank_0(chunk)
        return chunk

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[Any] | None, bool, int, int]:
        active = list(self.active_requests.values())
        decoding = [state for state in active if state.status == RequestStatus.DECODING]
        prefilling = [state for state in active if state.status == RequestStatus.PREFILLING]
        # The library holds new requests back after it has set one back for lack of cache.
        if not self.block_new_requests or not active:
            prefilling += self._get_waiting_candidates()
        self._turn += 1
        if self._turn % 2:
            prefilling.sort(key=lambda state: len(state.remaining_prefill_tokens))
        chunk = self._prefill_chunk(len(decoding), needed=bool(prefilling))
        budget = min(token_budget, len(decoding) + chunk)
        gone: set[str] = set()
        scheduled, failed, fast, queries, keys = self._process_candidates(
            decoding + prefilling, budget, cache_budget, gone
        )
        self._cleanup_waiting_queue(gone)
        if not scheduled:
            return (None if failed else []), fast, 0, 0
        decoded = sum(1 for future in scheduled if future.state.generated_tokens)
        self._open_step = (time.perf_counter(), decoded, queries - decoded)
        return scheduled, fast, queries, keys

    def _try_to_meet_safety_margin(self) -> bool:
        """Make room for the step from the prefix cache, oldest blocks first.

        The library would drop the whole prefix cache. Where even all of it is
        not enough, its own machinery sets back the newest sequence.
        """
        self.cache.pool.try_to_free_sectors()
        for allocator in self.cache.cache_allocators.values():
            pages = self.pace.budget // allocator.tokens_per_page
            wanted = pages + 2 * (len(self.active_requests) + len(self.waiting_requests))
            spare = self.cache.pool.num_free_sectors * allocator.blocks_per_sector
            missing = wanted - spare - self.cache.pool.count_free_blocks(allocator.index)
            ledger = allocator.ledger
            oldest = list(ledger.cached_blocks)[: max(0, missing)]
            for block in oldest:
                del ledger.cached_blocks[block]
                ledger.hash_to_block.pop(ledger.block_to_hash.pop(block))
            self.cache.pool.free_blocks(allocator.index, oldest)
        self.cache.pool.try_to_free_sectors()
        return True

    def _infer_request_tokens(self, state: RequestState, gone: set[str]) -> list[int]:
        fresh = state.status == RequestStatus.PENDING
        before = state.position_offset
        tokens: list[int] = super()._infer_request_tokens(state, gone)
        if fresh and state.position_offset > before:
            generation = self.registry.get(state.request_id)
            if generation is not None and not generation.emitted:
                generation.cached = min(state.position_offset, len(generation.job.prompt_ids))
        return tokens

    def _close_step(self) -> None:
        if self._open_step is None:
            return
        started, decoded, prefilled = self._open_step
        self._open_step = None
        seconds = time.perf_counter() - started
        self.pace.learn(decoded, prefilled, seconds)
        if started < self.log.since:
            return
        self.log.last_step_seconds = seconds
        self.log.step_seconds += seconds
        self.log.steps += 1


def _number(key: str) -> int:
    """Place of a sequence in the order in which they were queued."""
    return int(key.partition(":")[0])


SCHEDULER_MAPPING[SCHEDULER_TYPE] = FairScheduler
