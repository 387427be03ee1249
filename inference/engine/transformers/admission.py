"""Which sequences an engine holds, and how much of the cache each has booked.

The library ends its loop, with all requests in it, when one request can never
fit, so that is refused first. Each sequence books room for its prompt and the
next stretch of its answer, renewed ahead of need: an answer rarely uses all of
its ``max_tokens``, and with the default (what is left of the context) a few
requests would book the whole cache. Where many answers grow long together
after all, the library sets the newest back, recomputes it later, and the
client sees a pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from inference.engine.transformers.generation import Generation, Registry
from inference.messages import Job

STRETCH = 512
"""Answer tokens that a sequence reserves ahead."""
RENEW_BELOW = 64
"""Tokens left of a reservation at which the next stretch is reserved."""


class Admission:
    """The book of sequences. Used in the event loop's thread alone.

    Args:
        slots: sequences at a time.
        cache: the library's paged cache.
        longest: tokens of prompt and answer that one sequence may have.

    Attributes:
        live: sequences that somebody waits for, by request id.
        leaving: cancelled ones that the batching loop still holds, by key.
        reserved: cache sectors booked, of ``total``.
    """

    def __init__(self, registry: Registry, slots: int, cache: Any, longest: int) -> None:
        self.live: dict[str, Generation] = {}
        self.leaving: dict[str, Generation] = {}
        self.reserved = 0
        self.total: int = cache.num_sectors
        self.slots = slots
        self.longest = longest
        self._cache = cache
        self._registry = registry

    def __iter__(self) -> Iterator[Generation]:
        return iter([*self.live.values(), *self.leaving.values()])

    def free_slots(self) -> int:
        return max(0, self.slots - len(self.live) - len(self.leaving))

    def alone(self, generation: Generation) -> bool:
        """Whether the engine holds this one and no other."""
        return not self.leaving and list(self.live.values()) == [generation]

    def waiting(self) -> int:
        """Live sequences without a token yet."""
        return sum(1 for g in self.live.values() if not g.emitted)

    def fits(self, job: Job, resumed: int) -> bool:
        """Whether the job could start now. ``resumed`` ids are part of ``max_tokens``."""
        return (
            self.free_slots() > 0
            and len(job.prompt_ids) + job.params.max_tokens <= self.longest
            and self.reserved + self._units(_ahead(job, resumed)) <= self.total
        )

    def enter(self, generation: Generation) -> None:
        """Take a sequence in."""
        self.live[generation.job.id] = generation
        self._reserve(generation)

    def renew(self, generation: Generation) -> None:
        """Book the next stretch of an answer where the last one is nearly used up."""
        if generation.room - generation.length < RENEW_BELOW:
            self._reserve(generation)

    def leave(self, generation: Generation, *, still_held: bool) -> None:
        """Nobody waits for it any more; ``still_held``: its room is free once the batching loop says so."""
        self.live.pop(generation.job.id, None)
        generation.closed = True
        if still_held:
            self.leaving[generation.key] = generation
        else:
            self.release(generation)

    def release(self, generation: Generation) -> None:
        """Give back everything that a sequence holds; the one way out for every ending."""
        if generation.released:
            return
        generation.released = True
        self.leaving.pop(generation.key, None)
        self._registry.discard(generation.key)
        self.reserved -= generation.units
        generation.matcher = None

    def _reserve(self, generation: Generation) -> None:
        generation.room = _ahead(generation.job, len(generation.tokens))
        units = self._units(generation.room)
        self.reserved += units - generation.units
        generation.units = units

    def _units(self, tokens: int) -> int:
        """Cache sectors that a sequence of so many tokens can come to occupy."""
        total = 0
        for allocator in self._cache.cache_allocators.values():
            total += -(-allocator.needs_new_blocks("", 0, tokens) // allocator.blocks_per_sector)
        return total


def _ahead(job: Job, generated: int) -> int:
    """Length that a sequence reserves cache for, tokens, when so much of its answer is there."""
    return len(job.prompt_ids) + min(job.params.max_tokens, generated + STRETCH)
