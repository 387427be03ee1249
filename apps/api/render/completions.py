"""``text_completion``, streamed or whole."""

from __future__ import annotations

from typing import Any

from apps.api.choices import Choice, Delta
from apps.api.generation import Generation
from apps.api.render.base import Chunked, dump, text_logprobs


class CompletionRenderer(Chunked):
    """OpenAI's completions, with echo, several prompts and best_of."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation, "text_completion")
        self._open = [self._head + b'{"index":%d,"text":' % index for index in range(len(generation.choices))]
        self._close = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._offsets = [len(choice.echo) for choice in generation.choices]
        self._unfinished = len(generation.choices)

    def start(self) -> bytes:
        return b"".join(
            self._open[index] + dump(choice.echo) + self._close
            for index, choice in enumerate(self.generation.choices)
            if choice.echo
        )

    def delta(self, index: int, delta: Delta) -> bytes:
        stamp = self.stamp(delta.seq)
        if not delta.logprobs and delta.finish is None:
            return stamp + self._open[index] + dump(delta.text) + self._close
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, delta.logprobs),
            "finish_reason": delta.finish,
        }
        return stamp + self._head + dump(choice) + self._closing(delta)

    def _closing(self, delta: Delta) -> bytes:
        if delta.finish is not None:
            self._unfinished -= 1
        if self._unfinished or not self.plan.closing_usage:
            return self._tail
        return b'],"usage":' + dump(self.generation.usage().to_dict()) + b"}\n\n"

    def _logprobs(self, index: int, entries: list[Any]) -> dict[str, Any] | None:
        plan = self.plan
        if plan.show_logprobs is None:
            return None
        out, self._offsets[index] = text_logprobs(plan.tokenizer, entries, plan.show_logprobs, self._offsets[index])
        return out

    def body(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "id": plan.id,
            "object": "text_completion",
            "created": plan.created,
            "model": plan.model,
            "choices": [
                {
                    "index": shown,
                    "text": choice.echo + "".join(choice.text),
                    "logprobs": self._logprobs(number, choice.logprobs),
                    "finish_reason": choice.finish,
                }
                for shown, (number, choice) in enumerate(self._kept())
            ],
            "usage": self.generation.usage().to_dict(),
        }

    def _kept(self) -> list[tuple[int, Choice]]:
        """Of each prompt's answers the best ones, as many as were asked for."""
        plan, numbered = self.plan, list(enumerate(self.generation.choices))
        if plan.keep == plan.per_prompt:
            return numbered
        out = []
        for first in range(0, len(numbered), plan.per_prompt):
            group = numbered[first : first + plan.per_prompt]
            group.sort(key=lambda item: _mean(item[1]), reverse=True)
            out += group[: plan.keep]
        return out


def _mean(choice: Choice) -> float:
    entries = choice.logprobs
    return sum(entry.logprob for entry in entries) / len(entries) if entries else float("-inf")
