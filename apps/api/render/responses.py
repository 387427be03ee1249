"""The ``response`` object and the events that build it up."""

from __future__ import annotations

import secrets
from typing import Any

from apps.api.choices import Delta
from apps.api.errors import ApiError
from apps.api.generation import Generation
from apps.api.render.base import dump
from apps.api.toolparse import CallDelta


class ResponseRenderer:
    """OpenAI's responses.

    Args:
        echo: the request's own parameters, as the response repeats them.
    """

    def __init__(self, generation: Generation, echo: dict[str, Any]) -> None:
        self.generation = generation
        self.plan = generation.plan
        self.echo = echo
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._number = 0
        if generation.done and generation.choices[0].finish is not None:
            # A plain answer: everything has been read already.
            choice = generation.choices[0]
            self._take(Delta(0, "".join(choice.text), pieces=choice.pieces, finish=choice.finish))

    # --- the stream -------------------------------------------------------------------

    def start(self) -> bytes:
        pending = self._response("in_progress")
        return self._event("response.created", response=pending) + self._event("response.in_progress", response=pending)

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._take(delta)

    def end(self) -> bytes:
        kind = "response.incomplete" if self.generation.choices[0].finish == "length" else "response.completed"
        return self._event(kind, response=self.body())

    def failed(self, error: ApiError) -> bytes:
        """The last event of an answer that could not be completed."""
        response = self._response("failed")
        # OpenAI lists the codes that this event may have. None of them is for what a client or its deadline has ended.
        code = "server_error" if error.status >= 500 else error.code
        response["error"] = {"code": code, "message": error.message}
        return self._event("response.failed", response=response)

    def _take(self, delta: Delta) -> bytes:
        # What follows a call is an item of its own behind it, also where both came together.
        pieces = delta.pieces or filter(None, [delta.text])
        out = [self._text(piece) if isinstance(piece, str) else self._call(piece) for piece in pieces]
        if delta.finish is not None:
            if not self.items:
                out.append(self._begin_text())
            # An answer that ends within a call, and is not said to end with one, was cut by a stop string.
            cut = self._open is not None and self._open["type"] == "function_call" and delta.finish == "stop"
            out.append(self._close("incomplete" if cut or delta.finish == "length" else "completed"))
        return b"".join(out)

    def _text(self, text: str) -> bytes:
        out = b""
        if self._open is None or self._open["type"] != "message":
            out = self._close() + self._begin_text()
        assert self._open is not None
        self._open["content"][0]["text"] += text
        return out + self._event(
            "response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=[]
        )

    def _begin_text(self) -> bytes:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        added = self._add(item)
        item["content"] = [part]
        return added + self._event("response.content_part.added", **self._place(), content_index=0, part=part)

    def _call(self, call: CallDelta) -> bytes:
        out = b""
        if call.name is not None:
            item = {
                "id": f"fc_{secrets.token_hex(12)}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": call.id,
                "name": call.name,
                "arguments": "",
            }
            out = self._close() + self._add(item)
        if not call.arguments or self._open is None:
            return out
        self._open["arguments"] += call.arguments
        return out + self._event("response.function_call_arguments.delta", **self._place(), delta=call.arguments)

    def _add(self, item: dict[str, Any]) -> bytes:
        self.items.append(item)
        self._open = item
        return self._event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _close(self, status: str = "completed") -> bytes:
        item = self._open
        if item is None:
            return b""
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            out = self._event(
                "response.output_text.done", **self._place(), content_index=0, text=part["text"], logprobs=[]
            ) + self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        else:
            out = self._event(
                "response.function_call_arguments.done",
                **self._place(),
                name=item["name"],
                arguments=item["arguments"],
            )
        out += self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self._open = None
        return out

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = dump({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    # --- the object -------------------------------------------------------------------

    def body(self) -> dict[str, Any]:
        cut = self.generation.choices[0].finish == "length"
        out = self._response("incomplete" if cut else "completed")
        usage = self.generation.usage()
        out["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        out["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.completion,
        }
        return out

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.plan.id,
            "object": "response",
            "created_at": self.plan.created,
            "status": status,
            "model": self.plan.model,
            "output": self.items,
            "usage": None,
            "incomplete_details": None,
            "error": None,
            **self.echo,
        }
