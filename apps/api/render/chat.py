"""``chat.completion`` and ``chat.completion.chunk``."""

from __future__ import annotations

from typing import Any

from apps.api.choices import Choice, Delta
from apps.api.generation import Generation
from apps.api.render.base import Chunked, chat_logprobs, dump
from apps.api.toolparse import CallDelta


class ChatRenderer(Chunked):
    """OpenAI's chat completions."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation, "chat.completion.chunk")
        self._open = [
            self._head + b'{"index":%d,"delta":{"content":' % index for index in range(len(generation.choices))
        ]
        self._close = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def start(self) -> bytes:
        return b"".join(
            self._event(index, {"role": "assistant", "content": ""}) for index in range(len(self.generation.choices))
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        stamp = self.stamp(delta.seq)
        if delta.text and not delta.calls and not delta.logprobs and delta.finish is None:
            return stamp + self._open[index] + dump(delta.text) + self._close
        if self.resumable:
            # One event per number: a client that was cut off between two of the same would miss the second.
            content = {"content": delta.text} if delta.text or delta.logprobs else {}
            return stamp + self._event(index, content, delta, delta.finish)
        out = []
        if delta.text or delta.logprobs:
            out.append(self._event(index, {"content": delta.text}, delta))
        out += [self._event(index, {"tool_calls": [call_chunk(call)]}) for call in delta.calls]
        if delta.finish is not None:
            out.append(self._event(index, {}, None, delta.finish))
        return b"".join(out)

    def _event(
        self, index: int, content: dict[str, Any], delta: Delta | None = None, finish: str | None = None
    ) -> bytes:
        choice = {
            "index": index,
            "delta": content,
            "logprobs": self._logprobs(delta.logprobs) if delta is not None else None,
            "finish_reason": finish,
        }
        return self._head + dump(choice) + self._tail

    def _logprobs(self, entries: list[Any]) -> dict[str, Any] | None:
        if self.plan.show_logprobs is None:
            return None
        return chat_logprobs(self.plan.tokenizer, entries, self.plan.show_logprobs)

    def body(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "id": plan.id,
            "object": "chat.completion",
            "created": plan.created,
            "model": plan.model,
            "choices": [
                {
                    "index": index,
                    "message": message(choice),
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish,
                }
                for index, choice in enumerate(self.generation.choices)
            ],
            "usage": self.generation.usage().to_dict(),
        }


def message(choice: Choice) -> dict[str, Any]:
    """The assistant message that one choice adds up to."""
    text = "".join(choice.text)
    out: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if choice.calls:
        out["content"] = text or None
        out["tool_calls"] = whole_calls(choice.calls)
    return out


def whole_calls(pieces: list[CallDelta]) -> list[dict[str, Any]]:
    """Put calls together out of their pieces."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.name is not None:
            calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls


def call_chunk(piece: CallDelta) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": piece.arguments}
    if piece.name is None:
        return {"index": piece.index, "function": function}
    return {
        "index": piece.index,
        "id": piece.id,
        "type": "function",
        "function": {"name": piece.name, **function},
    }
