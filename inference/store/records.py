"""What the store takes and gives: typed records."""

from __future__ import annotations

from typing import Any

import msgspec

from inference.messages import Job, SamplingParams


class Submission(msgspec.Struct, frozen=True):
    """A request as the API hands it over. ``timeout`` in seconds from acceptance."""

    job: Job
    endpoint: str
    transport: str
    owner: str
    client: str = ""
    priority: str = "normal"
    timeout: float = 600.0
    resumable: bool = False


#: Sampling parameters that are numbers or switches.
NUMERIC = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logprobs", "ignore_eos", "min_tokens",
)  # fmt: skip
#: Those that may hold words of a client: of them only how many there are is told.
WORDED = ("stop", "stop_token_ids", "logit_bias")
_DEFAULTS = SamplingParams(max_tokens=0)


def described(params: SamplingParams) -> dict[str, float]:
    """What was asked for where that is not the default, without a word of the client: it outlives the request."""
    shown: dict[str, float] = {
        n: v for n in NUMERIC if (v := getattr(params, n)) is not None and v != getattr(_DEFAULTS, n)
    }
    shown |= {n: len(v) for n in WORDED if (v := getattr(params, n))}
    return {**shown, "grammar": 1} if params.grammar is not None else shown


def all_parameters(shown: dict[str, float]) -> list[tuple[str, str]]:
    """What :func:`described` gives, with the defaults, as names and texts."""
    numbers = [(n, shown.get(n, getattr(_DEFAULTS, n))) for n in NUMERIC]
    rows = [(n, str(v)) for n, v in numbers if v is not None]
    rows += [(n, f"{shown[n]:g} given") for n in WORDED if n in shown]
    return [*rows, ("grammar", "given")] if "grammar" in shown else rows


def claims_from(text: str) -> list[tuple[int, str]]:
    """(ms, worker) of each claim, oldest first; no worker where the request went back into the queue."""
    lines = [line.partition(" ") for line in text.splitlines()]
    return [(int(ms), worker) for ms, _, worker in lines]


class Claim(msgspec.Struct, frozen=True):
    """A request that a worker has taken, with the encoded frames it already has."""

    id: str
    attempt: int
    job: Job
    server: str
    log: list[bytes]


class Attached(msgspec.Struct, frozen=True):
    """A stream taken over by this server, for its ``turn``-th reader after the first."""

    id: str
    state: str
    model: str
    endpoint: str
    owner: str
    attempt: int
    prompt_tokens: int
    job: Job
    turn: int
    created_ms: int


class RequestView(msgspec.Struct, frozen=True):
    """A request as operators see it. Times are ms of the Redis clock, 0 where not reached.

    Attributes:
        phase: ``queued``, ``prefill``, ``decode``, ``finishing`` (its last token
            is logged), ``detached`` (nobody reads it now), or ``blocked`` (tokens
            wait because its client does not take them).
        position: place in the queue, 0 first, ``None`` unless queued.
        orphaned: the server or worker it names has no heartbeat (a reaper takes
            it within seconds).
        blocked_since_ms: since when its client takes nothing, by its server's
            clock; 0 where it does.
    """

    id: str
    state: str
    phase: str
    model: str
    endpoint: str
    transport: str
    owner: str
    client: str
    server: str
    worker: str
    attempt: int
    priority: str
    resumable: bool
    created_ms: int
    claimed_ms: int
    first_token_ms: int
    last_token_ms: int
    deadline_ms: int
    prompt_tokens: int
    max_tokens: int
    generated_tokens: int
    position: int | None = None
    orphaned: bool = False
    blocked_since_ms: int = 0


class Page(msgspec.Struct, frozen=True):
    """A slice of the live requests at ``now_ms`` (Redis clock); ``total`` counts all of them."""

    total: int
    items: list[RequestView]
    now_ms: int


FIELDS = [
    "state",  # these four are known to view.lua
    "model",
    "server",
    "worker",
    "endpoint",
    "transport",
    "owner",
    "client",
    "attempt",
    "class",
    "resumable",
    "created",
    "claimed",
    "first",
    "last",
    "deadline",
    "prompt_tokens",
    "max_tokens",
    "tokens",
    "finish",
]
_CLASSES = ["high", "normal", "low"]


def view_from(request_id: bytes, place: int, orphaned: int, blocked: int, *values: bytes) -> RequestView:
    """Build a view from a row that view.lua gives: the last are the values of :data:`FIELDS`."""
    rec: dict[str, Any] = {k: v.decode() for k, v in zip(FIELDS, values, strict=True)}

    def number(name: str) -> int:
        return int(float(rec[name] or 0))

    if blocked:
        phase = "blocked"
    elif rec["state"] == "queued":
        phase = "queued"
    elif rec["finish"]:
        phase = "finishing"
    elif not rec["server"]:
        phase = "detached"
    else:
        phase = "decode" if number("tokens") else "prefill"
    return RequestView(
        id=request_id.decode(),
        state=rec["state"],
        phase=phase,
        model=rec["model"],
        endpoint=rec["endpoint"],
        transport=rec["transport"],
        owner=rec["owner"],
        client=rec["client"],
        server=rec["server"],
        worker=rec["worker"],
        attempt=number("attempt"),
        priority=_CLASSES[min(number("class"), 2)],
        resumable=rec["resumable"] == "1",
        created_ms=number("created"),
        claimed_ms=number("claimed"),
        first_token_ms=number("first"),
        last_token_ms=number("last"),
        deadline_ms=number("deadline"),
        prompt_tokens=number("prompt_tokens"),
        max_tokens=number("max_tokens"),
        generated_tokens=number("tokens"),
        position=place if place >= 0 else None,
        orphaned=bool(orphaned),
        blocked_since_ms=blocked,
    )
