"""What the wire formats share: escaping, tokens as text, errors and pings as events.

Streams are put together by hand, a constant prefix and suffix around each
escaped text, because this runs once per token of every stream.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from apps.api.choices import Delta
from apps.api.errors import ApiError
from apps.api.generation import Generation
from inference.messages import TokenLogprob
from inference.text.protocol import Tokenizer

dump = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class Renderer(Protocol):
    """Turns one generation into the bytes of one format."""

    def start(self) -> bytes:
        """What a stream begins with."""

    def delta(self, index: int, delta: Delta) -> bytes:
        """The events of one delta."""

    def end(self) -> bytes:
        """What follows the last delta of a complete answer."""

    def body(self) -> dict[str, Any]:
        """The plain answer, once everything has been read."""


def error_event(error: ApiError) -> bytes:
    """The event that ends a stream which could not be completed; no [DONE] follows."""
    return b"data: " + error.body() + b"\n\n"


def queue_event(position: int, seconds: float) -> bytes:
    """Where a waiting request stands; only for clients that asked for it."""
    return b"event: queue\ndata: " + dump({"position": position, "estimate_s": round(seconds, 1)}) + b"\n\n"


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; one that is no whole text as its bytes, escaped: ``\\xf0\\x9f``."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob], count: int) -> dict[str, Any]:
    """OpenAI's chat form, one entry per token of the answer."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_name(tokenizer, token_id),
            "logprob": logprob,
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return {
        "content": [
            {
                **one(entry.token_id, entry.logprob),
                "top_logprobs": [one(token_id, logprob) for token_id, logprob in entry.top[:count]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def text_logprobs(
    tokenizer: Tokenizer, entries: list[TokenLogprob], count: int, offset: int
) -> tuple[dict[str, Any], int]:
    """OpenAI's completions form, and the offset after its last token.

    Args:
        offset: characters of answer text before the first entry.
    """
    tokens, offsets, tops = [], [], []
    for entry in entries:
        name = _legacy_name(tokenizer, entry.token_id)
        tokens.append(name)
        offsets.append(offset)
        # The chosen token is always among them, as one more where it is not one of the likeliest.
        top = {_legacy_name(tokenizer, token_id): logprob for token_id, logprob in entry.top[:count]}
        tops.append(top | {name: entry.logprob})
        # A character counts with its first byte: tokens may be parts of one, and special ones show nothing.
        offset += sum(byte & 0xC0 != 0x80 for byte in tokenizer.visible_bytes(entry.token_id))
    out = {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
    return out, offset


def _legacy_name(tokenizer: Tokenizer, token_id: int) -> str:
    name = token_name(tokenizer, token_id)
    return f"bytes:{name}" if name.startswith("\\x") else name


class Stamped:
    """Resumable streams number their events, so that a client can say where it stopped."""

    def __init__(self, generation: Generation) -> None:
        self.resumable = generation.plan.resumable

    def stamp(self, seq: int) -> bytes:
        return b"id: %d\n" % seq if self.resumable else b""


class Chunked(Stamped):
    """What OpenAI's two classic streams share: constant bytes around every choice, and the usage at the end."""

    def __init__(self, generation: Generation, kind: str) -> None:
        super().__init__(generation)
        self.generation = generation
        plan = self.plan = generation.plan
        head = dump({"id": plan.id, "object": kind, "created": plan.created, "model": plan.model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._usage = bool(plan.options.include_usage)
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def end(self) -> bytes:
        if not self._usage:
            return DONE
        return self._head + b'],"usage":' + dump(self.generation.usage().to_dict()) + b"}\n\n" + DONE
