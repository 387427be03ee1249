"""One answer while it is being written: what its watchers see."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from apps.chat.live import Block, LiveMarkdown
from apps.chat.models import Message
from inference.lifecycle import Reason
from inference.messages import Frame
from sluice import runtime

SLOW_RENDER = 0.02
"""A rendering that takes longer than this, seconds, makes the next one leave the event loop."""
LARGE_STEP = 1_000
"""So much text at once, in characters, is rendered off the event loop whatever the last rendering took."""


class Recording:
    """Text, progress and end of one answer; sockets watch it, one task writes it.

    Attributes:
        seq: frames of the request that ``text`` contains.
        position: place in the queue, 0 first; ``None`` unless waiting.
        version: grows with every change that a watcher may want to show.
        final: the answer as the page shows it in the end.
        released: this process has let go of it although it goes on elsewhere.
        render_seconds: what the last rendering took; watchers pace themselves by it.
    """

    def __init__(self, message_id: uuid.UUID, conversation_id: uuid.UUID, user_id: int, text: str = "") -> None:
        self.message_id = message_id
        self.conversation_id = conversation_id
        self.user_id = user_id
        self.request_id = ""
        self.text = text
        self.seq = 0
        self.position: int | None = None
        self.version = 0
        self.tokens = 0
        self.prompt_tokens = 0
        self.finish: str | None = None
        self.error = ""
        self.final: dict[str, Any] | None = None
        self.released = False
        self.stop_wanted: Reason | None = None
        self.watchers: set[object] = set()
        self.render_seconds = 0.0
        self._started = time.monotonic()
        self._first: float | None = None
        self._last: float | None = None
        self._first_tokens = 0
        self._known_ttft: int | None = None
        self._resumed = False
        self._live = LiveMarkdown()
        self._rendered = -1
        self._rendered_length = 0
        self._rendering = asyncio.Lock()
        self._at_work = threading.Lock()  # a watcher may leave while its rendering goes on
        self._changed = asyncio.Event()

    @classmethod
    def of(cls, message: Message, user_id: int) -> Recording:
        """Of an answer that another process began, or this one before it was restarted."""
        recording = cls(message.id, message.conversation_id, user_id, message.text)
        recording.request_id, recording.seq = message.request_id, message.seq
        recording.tokens, recording.prompt_tokens = message.generated_tokens, message.prompt_tokens
        recording._known_ttft, recording._resumed = message.ttft_ms, True
        return recording

    def progress(self) -> dict[str, Any]:
        """What a row keeps of the answer so far."""
        return {
            "text": self.text,
            "seq": self.seq,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.tokens,
            "ttft_ms": self.ttft_ms,
            "tokens_per_second": self.tokens_per_second,
        }

    @property
    def over(self) -> bool:
        return self.final is not None or self.released

    @property
    def ttft_ms(self) -> int | None:
        """From the send to the first token that shows, milliseconds."""
        if self._resumed or self._first is None:
            return self._known_ttft
        return round((self._first - self._started) * 1000)

    @property
    def tokens_per_second(self) -> float | None:
        """Rate after the first frame; ``None`` until a second one has come."""
        if self._first is None or self._last is None or self._last <= self._first:
            return None
        return round((self.tokens - self._first_tokens) / (self._last - self._first), 1)

    def take(self, frames: Sequence[Frame]) -> None:
        """Add what a step produced."""
        now = time.monotonic()
        for frame in frames:
            self.seq = frame.seq
            self.tokens += len(frame.ids)
            # PostgreSQL stores no NUL in a text, and a page shows it as this character anyhow.
            self.text += frame.text.replace("\x00", "\ufffd")
            if frame.finish is not None:
                self.finish = frame.finish
                self.error = frame.error or ""
        if frames:
            if self._first is None and any(frame.text or frame.finish for frame in frames):
                self._first, self._first_tokens = now, self.tokens
            self._last = now
            self.position = None
            self.bump()

    def place(self, position: int | None) -> None:
        if position != self.position:
            self.position = position
            self.bump()

    def replace(self, text: str, seq: int) -> None:
        """Text that another process has recorded."""
        if (text, seq) != (self.text, self.seq):
            if not text.startswith(self.text):
                self._live, self._rendered, self._rendered_length = LiveMarkdown(), -1, 0
            self.text, self.seq = text, seq
            self.bump()

    def end(self, final: dict[str, Any]) -> None:
        self.final = final
        self.bump()

    def release(self) -> None:
        self.released = True
        self.bump()

    def bump(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, version: int) -> None:
        """Until ``version`` is no longer the newest."""
        while self.version == version:
            await self._changed.wait()

    async def show(self) -> list[Block]:
        """:meth:`blocks`; where they have become costly, off the event loop, which serves everybody."""
        async with self._rendering:
            if self.render_seconds < SLOW_RENDER and len(self.text) - self._rendered_length < LARGE_STEP:
                return list(self.blocks())
            return list(await runtime.offload(self.blocks))

    def blocks(self) -> list[Block]:
        """The text so far, rendered once for all watchers."""
        with self._at_work:
            live = self._live
            if self._rendered != self.version:
                self._rendered = self.version
                self._rendered_length = len(self.text)
                begin = time.perf_counter()
                live.update(self.text)
                self.render_seconds = time.perf_counter() - begin
            return live.blocks
