"""``/v1/embeddings``: one request of the core per text, a window of them at a time."""

from __future__ import annotations

import base64
import math
import struct
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from apps.accounts.limits import LimitExceeded, limiter_of
from apps.accounts.principal import Principal
from apps.api import deps, plan, prompts
from apps.api.errors import ApiError, from_detached, from_outcome, from_refusal, header_pairs, invalid, over_limit
from apps.api.generation import wait_hint
from apps.api.http import ApiConsumer
from apps.api.jobs import context_limit
from apps.api.schema.base import Decoder
from apps.api.schema.embeddings import MAX_INPUTS, EmbeddingBody
from inference.errors import Refused, StoreUnavailable
from inference.gateway import Detached, RequestEnded, RequestSpec, StreamGroup
from inference.messages import Job, SamplingParams

WINDOW = 16
"""Texts of one request that are in the core at once: a long list leaves room in the queue for others."""

decode_embedding = Decoder(EmbeddingBody)


class EmbeddingsConsumer(ApiConsumer):
    """``POST /v1/embeddings``."""

    async def post(self, body: bytes) -> None:
        self.need("generate")
        asked = decode_embedding(body)
        work = await prepare(asked, self.caller)
        vectors, headers = await compute(work, self.caller, self.client)
        reply = await deps.offload(lambda: _reply(asked, work, vectors))
        headers = [(b"content-type", b"application/json"), (b"x-sluice-request", work.id.encode()), *headers]
        await self.send_bytes(200, reply, headers)


@dataclass(slots=True)
class Work:
    """An embedding request that is known to be sound. ``deadline`` is on this process's monotonic clock."""

    id: str
    model: str
    jobs: list[Job]
    priority: str
    deadline: float

    @property
    def tokens(self) -> int:
        return sum(len(job.prompt_ids) for job in self.jobs)


async def prepare(asked: EmbeddingBody, caller: Principal) -> Work:
    """Check the request and tokenise its texts.

    Raises:
        ApiError: the request is wrong, or can not be prepared now.
    """
    if plan.check_model(asked.model, caller).kind != "embed":
        raise invalid(f"The model {asked.model!r} does not make embeddings.", "model", "model_not_supported")
    priority, timeout = plan.service_of(asked.priority, asked.timeout, caller)
    texts = prompts.split(asked.input, "input")
    if len(texts) > MAX_INPUTS:
        raise invalid(f"One request takes at most {MAX_INPUTS} texts.", "input", "invalid_value")
    if not all(texts):
        raise invalid("A text is empty.", "input", "invalid_value")
    served = deps.gateway().models().get(asked.model)
    if asked.dimensions is not None and served is not None and served.dimensions:
        check_dimensions(asked.dimensions, served.dimensions)
    tokenizer = await deps.tokenizer(asked.model)
    limit = context_limit(asked.model, tokenizer)
    prepared = await prompts.in_thread(lambda: [prompts.prompt_ids(tokenizer, text, limit, "input") for text in texts])
    name = plan.new_id("embd")
    nothing = SamplingParams(max_tokens=0, seed=0)
    names = [name] if len(prepared) == 1 else [f"{name}-{number}" for number in range(len(prepared))]
    jobs = [Job(job_id, asked.model, ids, nothing) for job_id, ids in zip(names, prepared, strict=True)]
    return Work(name, asked.model, jobs, priority, time.monotonic() + timeout)


async def compute(work: Work, caller: Principal, client: str) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    """The vectors (float32, little-endian) in the order of the jobs, and headers about the caller's limits.

    Raises:
        ApiError: it was not accepted, or has ended before all vectors were there.
    """
    try:
        limits = limiter_of(deps.gateway())
        async with limits.hold(caller.quotas, work.id, prompt_tokens=work.tokens, max_tokens=0) as lease:
            lease.used = 0
            vectors: list[bytes] = []
            for first in range(0, len(work.jobs), WINDOW):
                vectors += await _window(work, work.jobs[first : first + WINDOW], caller, client)
                lease.used = sum(len(job.prompt_ids) for job in work.jobs[: len(vectors)])
            return vectors, list(header_pairs(lease.headers))
    except LimitExceeded as exc:
        raise over_limit(exc) from None
    except (Refused, StoreUnavailable) as exc:
        raise from_refusal(exc, work.model, await wait_hint(work.model, exc), "input") from exc


async def _window(work: Work, jobs: Sequence[Job], caller: Principal, client: str) -> list[bytes]:
    """Some of the vectors; leaves nothing of these jobs behind, however it ends."""
    found: dict[int, str] = {}
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(
                deps.gateway().request(
                    RequestSpec(
                        job=job,
                        endpoint="embeddings",
                        transport="json",
                        owner=caller.owner,
                        client=client,
                        priority=work.priority,
                        timeout=max(0.001, work.deadline - time.monotonic()),
                    )
                )
            )
            for job in jobs
        ]
        group = StreamGroup(streams)
        try:
            while not group.done:
                for index, frames in await group.next():
                    for frame in frames:
                        if frame.finish == "error":
                            what = frame.error or "The engine failed on this request."
                            raise ApiError(500, what, code="engine_error")
                        found[index] = found.get(index, "") + frame.text
        except RequestEnded as exc:
            raise from_outcome(exc.outcome, str(exc)) from exc
        except Detached as exc:
            raise from_detached(exc) from exc
    return [base64.b64decode(found[index]) for index in range(len(jobs))]


def _reply(asked: EmbeddingBody, work: Work, vectors: Sequence[bytes]) -> bytes:
    """The body; made in a thread, as it may have a million numbers.

    Raises:
        ApiError: 400, more dimensions than the model has.
    """
    as_text = asked.encoding_format == "base64"
    data: list[dict[str, Any]] = []
    for index, packed in enumerate(vectors):
        vector: list[float] | None = None
        if asked.dimensions is not None or not as_text:
            vector = list(struct.unpack(f"<{len(packed) // 4}f", packed))
        if asked.dimensions is not None and vector is not None:
            vector = shortened(vector, asked.dimensions)
            packed = struct.pack(f"<{len(vector)}f", *vector)
        shown = base64.b64encode(packed).decode() if as_text else vector
        data.append({"object": "embedding", "index": index, "embedding": shown})
    usage = {"prompt_tokens": work.tokens, "total_tokens": work.tokens}
    return msgspec.json.encode({"object": "list", "model": work.model, "data": data, "usage": usage})


def check_dimensions(asked: int, own: int) -> None:
    """Refuse to shorten a vector to more components than the model's own number.

    Raises:
        ApiError: 400.
    """
    if asked > own:
        raise invalid(f"The model's vectors have {own} dimensions.", "dimensions", "invalid_value")


def shortened(vector: list[float], size: int) -> list[float]:
    """The first components, of length 1 again.

    Raises:
        ApiError: 400, there are not so many.
    """
    check_dimensions(size, len(vector))
    kept = vector[:size]
    length = math.sqrt(math.fsum(x * x for x in kept))
    return [x / length for x in kept] if length else kept
