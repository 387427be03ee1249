"""From messages and texts to token ids, off the event loop and bounded.

Tokenising happens in a few threads kept for it. A size check comes first, so
that text which can not fit costs next to nothing, and no more texts are in
hand at once than may wait in the queue afterwards, or ``LEAST_WAITING``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from apps.api import deps
from apps.api import tools as toolkit
from apps.api.errors import ApiError, invalid
from apps.api.schema.messages import AssistantMessage, ChatMessage, ToolMessage, text_of
from apps.api.toolparse import OPEN
from inference.errors import TooLarge
from inference.models.chat_template import ChatTemplateError
from inference.text.protocol import Tokenizer

T = TypeVar("T")

LEAST_WAITING = 256
"""Texts that may be in hand at once however short the queue is."""
RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "limit", "continue_final", "documents", "tokenize", "self"}
)

_waiting = 0
_speaks: WeakKeyDictionary[Tokenizer, bool] = WeakKeyDictionary()


async def in_thread(work: Callable[[], T]) -> T:
    """Run tokeniser work in the pool.

    Raises:
        ApiError: 429 where too much of it is waiting already.
    """
    global _waiting
    if _waiting >= max(LEAST_WAITING, deps.config().max_queued):
        raise ApiError(429, "Too many prompts are being prepared.", code="overloaded", retry_after=1.0)
    _waiting += 1
    try:
        return await deps.offload(work)
    finally:
        _waiting -= 1


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages in the one form that templates get: text content, roles they know.

    Raises:
        ApiError: a tool result that answers no call.
    """
    out: list[dict[str, Any]] = []
    called: set[str] = set()
    for at, message in enumerate(messages):
        role = str(message.__struct_config__.tag)
        item: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text_of(message.content)}
        if isinstance(message, ToolMessage):
            if not called:
                text = "A tool's result answers a call, and no call comes before this one."
                raise invalid(text, f"messages[{at}].role", "invalid_value")
            if message.tool_call_id not in called:
                text = "The tool message answers no call of this conversation."
                raise invalid(text, f"messages[{at}].tool_call_id", "invalid_value")
            item["tool_call_id"] = message.tool_call_id
        elif message.name is not None:
            item["content"] = f"{message.name}: {item['content']}"
        if isinstance(message, AssistantMessage) and message.tool_calls:
            called.update(call.id for call in message.tool_calls)
            item["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": toolkit.arguments_of(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        out.append(item)
    return out


def chat_ids(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    use: toolkit.ToolUse | None,
    limit: int,
    kwargs: dict[str, Any],
    continue_final: bool = False,
) -> list[int]:
    """Render a conversation; runs in a worker thread.

    Raises:
        ApiError: 400, more than ``limit`` tokens, or a shape that the model's
            template refuses.
    """
    if not tokenizer.has_chat_template:
        raise invalid("The model has no chat template; use /v1/completions.", "model", "unsupported_parameter")
    for name in kwargs:
        if name in RESERVED_KWARGS or name.startswith("_"):
            raise invalid(f"{name!r} can not be set.", f"chat_template_kwargs.{name}", "invalid_value")
    _check_size(tokenizer, (m["content"] for m in messages), limit)
    signatures = use.signatures() if use is not None else None
    try:
        if not speaks_tools(tokenizer):
            messages, signatures = toolkit.spell_out(messages, use), None
        ids = tokenizer.render_chat(messages, tools=signatures, continue_final=continue_final, limit=limit, **kwargs)
    except TooLarge:
        raise too_long(limit) from None
    except ChatTemplateError as exc:
        raise invalid(str(exc), "messages", "invalid_value") from None
    except RecursionError:
        param = "tools" if use is not None else "messages"
        raise invalid("A tool or a call is nested too deeply.", param, "invalid_value") from None
    return _checked(ids, limit, "messages")


def speaks_tools(tokenizer: Tokenizer) -> bool:
    """Whether the model's template itself teaches calls in the ``<tool_call>`` format."""
    known = _speaks.get(tokenizer)
    if known is None:
        sample = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
        try:
            ids = tokenizer.render_chat([{"role": "user", "content": "x"}], tools=sample)
            known = OPEN in tokenizer.decode(ids, skip_special=False)
        except ChatTemplateError:
            known = False
        _speaks[tokenizer] = known
    return known


def split(prompt: str | list[str | int | list[int]], param: str = "prompt") -> list[str | list[int]]:
    """The prompts in a field that takes one or several, as texts or token ids.

    Raises:
        ApiError: an empty list, or a list of mixed kinds.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid(f"The list of {param} is empty.", param, "invalid_value")
    if all(isinstance(x, int) for x in prompt):
        return [prompt]  # type: ignore[list-item]
    if all(isinstance(x, str) for x in prompt) or all(isinstance(x, list) for x in prompt):
        return list(prompt)  # type: ignore[arg-type]
    raise invalid("A list holds texts, token ids, or lists of token ids, not a mix.", param, "invalid_value")


def prompt_ids(tokenizer: Tokenizer, prompt: str | list[int], limit: int, param: str = "prompt") -> list[int]:
    """One of the prompts that :func:`split` gives, as token ids; runs in a worker thread.

    Raises:
        ApiError: as :func:`text_ids` and :func:`given_ids`.
    """
    if isinstance(prompt, str):
        return text_ids(tokenizer, prompt, limit, param)
    return given_ids(tokenizer, prompt, limit, param)


def text_ids(tokenizer: Tokenizer, text: str, limit: int, param: str = "prompt") -> list[int]:
    """Encode a trusted prompt; runs in a worker thread.

    Raises:
        ApiError: 400, more than ``limit`` tokens or none at all.
    """
    try:
        ids = tokenizer.encode_bounded(text, limit, add_special_tokens=True, trusted=True)
    except TooLarge:
        raise too_long(limit, param) from None
    return _checked(ids, limit, param)


def given_ids(tokenizer: Tokenizer, ids: Sequence[int], limit: int, param: str = "prompt") -> list[int]:
    """Check a prompt that came as token ids.

    Raises:
        ApiError: 400, an id outside of the vocabulary, too many or none.
    """
    size = tokenizer.vocab_size
    for at, token_id in enumerate(ids):
        if not 0 <= token_id < size:
            text = f"Token id {at} of the {param} is outside of the vocabulary (0 to {size - 1})."
            raise invalid(text, param, "invalid_value")
    return _checked(list(ids), limit, param)


def too_long(limit: int, param: str = "messages") -> ApiError:
    text = f"The prompt does not fit: this model takes at most {limit} prompt tokens."
    return invalid(text, param, "context_length_exceeded")


def _check_size(tokenizer: Tokenizer, texts: Any, limit: int) -> None:
    if sum(tokenizer.estimate_min_tokens(text) for text in texts) > limit:
        raise too_long(limit)


def _checked(ids: list[int], limit: int, param: str) -> list[int]:
    if not ids:
        raise invalid("The prompt has no tokens.", param, "invalid_value")
    if len(ids) > limit:
        raise too_long(limit, param)
    return ids
