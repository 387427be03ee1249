"""What the text path and the servers ask of a tokenizer.

Two stand behind it: :class:`inference.models.tokenizer.ModelTokenizer` for model
folders and :class:`inference.engine.scripted.ScriptedTokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

LeadingSpace = Literal["keep", "strip_one", "strip_token"]
"""What a whole decode does with a space at the very start.

``strip_one`` takes one space from the text, ``strip_token`` all spaces from the
first token: SentencePiece vocabularies mark the start of a word with a space
that is not part of a text's first word.
"""


class TokenBytes(Protocol):
    """The part of a tokenizer that the incremental detokeniser needs."""

    @property
    def leading_space(self) -> LeadingSpace: ...

    def visible_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that the token adds to a text; empty for special and unknown ids."""


class Tokenizer(TokenBytes, Protocol):
    """Everything that validation, prompts and log probabilities need. Thread-safe."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def context_length(self) -> int: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def upstream(self) -> bool:
        """Whether the real tokenizer is an upstream server's: lengths are guesses, and a job needs ``prompt_text``."""

    def encode(self, text: str, *, add_special_tokens: bool = False, trusted: bool = True) -> list[int]: ...

    def encode_bounded(
        self, text: str, limit: int, *, add_special_tokens: bool = False, trusted: bool = True
    ) -> list[int]: ...

    def estimate_min_tokens(self, text: str) -> int: ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        limit: int | None = None,
        **template_kwargs: Any,
    ) -> list[int]: ...
