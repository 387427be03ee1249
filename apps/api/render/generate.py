"""The native format of ``/generate``: one flat object per event."""

from __future__ import annotations

from typing import Any

from apps.api.choices import Delta
from apps.api.generation import Generation
from apps.api.render.base import DONE, Stamped, dump


class GenerateRenderer(Stamped):
    """Events ``{"id", "text", "finish_reason"}``; the last one adds usage and timings."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self.generation = generation
        plan = self.plan = generation.plan
        head = dump({"id": plan.id, "model": plan.model, "created": plan.created, "index": 0})
        self._head = b"data: " + head[:-1] + b',"text":'
        self._close = b',"finish_reason":null}\n\n'

    def start(self) -> bytes:
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        head = self.stamp(delta.seq) + self._head + dump(delta.text)
        if delta.finish is None:
            return head + self._close
        rest = dump({"finish_reason": delta.finish, **self._summary()})
        return head + b"," + rest[1:] + b"\n\n"

    def end(self) -> bytes:
        return DONE

    def body(self) -> dict[str, Any]:
        plan, choice = self.plan, self.generation.choices[0]
        return {
            "id": plan.id,
            "model": plan.model,
            "created": plan.created,
            "index": 0,
            "text": "".join(choice.text),
            "finish_reason": choice.finish,
            **self._summary(),
        }

    def _summary(self) -> dict[str, Any]:
        generation = self.generation
        return {
            "stop_reason": generation.choices[0].stop_match,
            "usage": generation.usage().to_dict(),
            "timings": generation.timings(),
        }
