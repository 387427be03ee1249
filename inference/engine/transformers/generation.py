"""One sequence that the engine generates: its parameters and what it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from inference.messages import Job, SamplingParams, TokenLogprob

EXCLUSIVE_BIAS = 1000.0
"""Added to a logit whose bias is 100 or more: larger than any difference of logits."""


class TokenCounts:
    """Distinct token ids and how often each occurred, as arrays that grow in place."""

    __slots__ = ("_counts", "_ids", "_index", "size")

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids: NDArray[np.int64] = np.empty(64, np.int64)
        self._counts: NDArray[np.float32] = np.zeros(64, np.float32)
        self._index: dict[int, int] = {}
        self.size = 0
        for token in ids:
            self.add(token)

    def add(self, token: int) -> None:
        slot = self._index.get(token)
        if slot is None:
            if self.size == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            slot = self._index[token] = self.size
            self._ids[slot] = token
            self.size += 1
        self._counts[slot] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self.size]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self.size]


class Generation:
    """State of one sequence.

    Written by the event loop until it is started, then by the generation
    thread, except for ``closed``, which the event loop sets when nobody wants
    the sequence any more.

    Attributes:
        key: its name inside the batching loop, once it is there; unique per submission.
        tokens: ids generated so far, those of earlier attempts included.
        stop_ids: ids that end the answer.
        units: cache units reserved for it while it lives.
        room: length that these units suffice for, tokens of prompt and answer.
        emitted: how many ids the batching loop has delivered.
        done: its last output has been made; the router drops what comes after.
        ended: the batching loop itself holds nothing of it any more.
        logprobs: entries for ids that are sampled but not yet delivered.
    """

    __slots__ = (
        "bias",
        "cached",
        "closed",
        "counts",
        "done",
        "emitted",
        "ended",
        "error",
        "greedy",
        "job",
        "key",
        "logprobs",
        "matcher",
        "params",
        "plain",
        "prior",
        "released",
        "room",
        "seed",
        "seen",
        "started",
        "stop_array",
        "stop_ids",
        "tokens",
        "units",
    )

    def __init__(
        self,
        job: Job,
        resumed: Sequence[int],
        *,
        eos_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        params = job.params
        self.key = ""
        self.job = job
        self.params = params
        self.prior = len(resumed)
        self.tokens = list(resumed)
        self.units = 0
        self.room = 0
        # With a grammar EOS is the only way to say "complete", whatever ignore_eos asks for.
        ends = frozenset() if params.ignore_eos and params.grammar is None else eos_ids
        self.stop_ids = ends | {i for i in params.stop_token_ids if 0 <= i < vocab_size}
        self.stop_array: NDArray[np.int64] = np.array(sorted(self.stop_ids), np.int64)
        self.seed = _seed(job)
        self.greedy = is_greedy(params)
        self.bias = _bias_arrays(params, vocab_size)
        self.counts = TokenCounts(resumed) if params.presence_penalty or params.frequency_penalty else None
        repeats = params.repetition_penalty != 1.0
        self.seen = TokenCounts([*job.prompt_ids, *resumed]) if repeats else None
        self.plain = (
            self.greedy
            and self.bias is None
            and self.counts is None
            and self.seen is None
            and params.logprobs is None
            and params.grammar is None
        )
        self.matcher: LLMatcher | None = None
        self.logprobs: list[TokenLogprob] = []
        self.emitted = 0
        self.cached = 0
        self.error: str | None = None
        self.started = False
        self.closed = False
        self.done = False
        self.ended = False
        self.released = False

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.job.prompt_ids) + len(self.tokens)

    @property
    def position(self) -> int:
        """Index of the token that is sampled next."""
        return len(self.tokens)

    @property
    def held_off(self) -> bool:
        """Whether stop ids are still masked by ``min_tokens``."""
        return len(self.tokens) < self.params.min_tokens and len(self.stop_ids) > 0

    def accept(self, token: int) -> None:
        """Take note of a token that the batching loop has delivered."""
        self.tokens.append(token)
        if self.counts is not None:
            self.counts.add(token)
        if self.seen is not None:
            self.seen.add(token)
        if self.matcher is not None and self.error is None and not self.matcher.consume_token(token):
            # Only a fault inside the grammar library gets here: the mask admits legal tokens alone.
            self.error = "The grammar could not be followed any further."

    def ending(self) -> str | None:
        """How the tokens so far end the answer: ``stop``, ``length`` or not at all."""
        if self.tokens and self.tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.params.max_tokens else None


class Registry:
    """Generations by key, shared by the two threads; each entry is set and deleted in one operation."""

    def __init__(self) -> None:
        self._by_key: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, generation: Generation) -> None:
        self._by_key[generation.key] = generation

    def discard(self, key: str) -> None:
        self._by_key.pop(key, None)

    def get(self, key: str) -> Generation | None:
        return self._by_key.get(key)


def is_greedy(params: SamplingParams) -> bool:
    """Whether only the most probable token can be chosen."""
    return params.temperature < 1e-5 or params.top_k == 1 or params.top_p <= 0.0


def _seed(job: Job) -> int:
    """The 64-bit seed of a job; one without a seed gets a fixed one from its id."""
    if job.params.seed is not None:
        return job.params.seed & 0xFFFFFFFFFFFFFFFF
    return int.from_bytes(hashlib.blake2b(job.id.encode(), digest_size=8).digest(), "little")


def _bias_arrays(params: SamplingParams, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    """Token ids and what to add to their logits: -100 bans a token, 100 admits no other."""
    items = {i: b for i, b in params.logit_bias.items() if 0 <= i < vocab_size and b}
    if not items:
        return None
    values = [-np.inf if b <= -100 else EXCLUSIVE_BIAS if b >= 100 else b for b in items.values()]
    return np.array(list(items), np.int64), np.array(values, np.float32)
