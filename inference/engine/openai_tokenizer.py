"""Lengths of prompts for models whose tokenizer is somewhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from inference.text.protocol import LeadingSpace

UNKNOWN_CONTEXT = 1 << 20  # where neither the upstream nor the settings name one, the upstream judges


class EstimatingTokenizer:
    """Stands in where the real tokenizer is the upstream's: lengths are guesses, ids are zeros.

    Four UTF-8 bytes count as one token. Nothing is refused because of a guess: whether a
    prompt fits is for the upstream to say.
    """

    leading_space: LeadingSpace = "keep"
    vocab_size = 1
    eos_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()
    has_chat_template = True
    upstream = True

    def __init__(self, *, context_length: int = 0) -> None:
        self.context_length = context_length or UNKNOWN_CONTEXT

    def encode(self, text: str, *, add_special_tokens: bool = False, trusted: bool = True) -> list[int]:
        return [0] * -(-len(text.encode("utf-8", "replace")) // 4)

    def encode_bounded(
        self, text: str, limit: int, *, add_special_tokens: bool = False, trusted: bool = True
    ) -> list[int]:
        return self.encode(text)[: max(limit, 0)]

    def estimate_min_tokens(self, text: str) -> int:
        return 0

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return ""

    def visible_bytes(self, token_id: int) -> bytes:
        return b""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def token_text(self, token_id: int) -> str:
        return ""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        limit: int | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        text = msgspec.json.encode([list(messages), list(tools or ())]).decode()
        ids = self.encode(text)
        return ids if limit is None else ids[: max(limit, 0)]
