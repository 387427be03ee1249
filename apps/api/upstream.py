"""Requests to models that another OpenAI-compatible server holds.

That server tokenizes, renders and constrains by itself: it gets the prompt as
the client gave it. What needs this side's tokenizer is refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from apps.api.errors import ApiError, invalid
from apps.api.schema.generation import ChatBody, GenerateBody
from inference.text.protocol import Tokenizer

_FORWARDED = ("response_format", "chat_template_kwargs")
#: An empty list of tools, or a choice without any, is refused by many servers.
_WITH_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")


def check(
    *, logprobs: int | None = None, echo: bool | None = None, ranked: bool = False, response_format: Any = None
) -> None:
    """Refuse what can not be passed on.

    Raises:
        ApiError: 400 that names the field.
    """
    if logprobs is not None:
        raise _unsupported("logprobs")
    if echo:
        raise _unsupported("echo")
    if ranked:
        raise _unsupported("best_of")
    if response_format is not None:
        raise _unsupported("response_format")


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raise 400 where the tokenizer is somebody else's."""
    if tokenizer.upstream:
        raise _unsupported("model")


def chat_text(body: ChatBody, continue_final: bool = False) -> str:
    """The conversation as the upstream gets it; sampling parameters are added by the engine."""
    return _encode(body, continue_final)


def generate_text(body: GenerateBody) -> str:
    """As :func:`chat_text`, for ``/generate``."""
    if isinstance(body.prompt, str):
        check(response_format=body.response_format)
        return prompt_text(body.prompt)
    return _encode(body)


def prompt_text(prompt: str | list[int]) -> str:
    """A plain prompt as the upstream gets it.

    Raises:
        ApiError: 400 for token ids, which belong to a tokenizer this side does not have.
    """
    if not isinstance(prompt, str):
        raise invalid("This model takes texts, not token ids.", "prompt", "unsupported_parameter")
    return msgspec.json.encode({"prompt": prompt}).decode()


def _encode(body: ChatBody | GenerateBody, continue_final: bool = False) -> str:
    out: dict[str, Any] = {"messages": body.messages}
    for name in (*_FORWARDED, *_WITH_TOOLS) if getattr(body, "tools", None) else _FORWARDED:
        value = getattr(body, name, None)
        if value is not None:
            out[name] = value
    if continue_final:
        out |= {"continue_final_message": True, "add_generation_prompt": False}
    return msgspec.json.encode(out).decode()


def _unsupported(name: str) -> ApiError:
    return invalid(f"{name!r} is not available for this model.", name, "unsupported_parameter")
