"""The shapes of answers, for the documents that describe them.

Answers are put together as plain data (streams even byte by byte); a test holds
real answers against these types.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Part of an answer."""


class ErrorObject(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer):
    """What every status from 400 on carries."""

    error: ErrorObject


class PromptDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(Answer):
    name: str
    arguments: str


class Call(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[Call] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Answer):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Timings(Answer):
    """Milliseconds as the server saw them."""

    total_ms: float
    ttft_ms: float | msgspec.UnsetType = msgspec.UNSET


class Generated(Answer):
    id: str
    model: str
    created: int
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    usage: Usage
    timings: Timings


class Suggested(Answer):
    temperature: float | msgspec.UnsetType = msgspec.UNSET
    top_p: float | msgspec.UnsetType = msgspec.UNSET


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    ready: bool
    kind: Literal["generate", "embed"]
    context_length: int | msgspec.UnsetType = msgspec.UNSET
    suggested: Suggested | msgspec.UnsetType = msgspec.UNSET


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET


class Text(Answer):
    prompt: str


class Request(Answer):
    """A request in flight; which of the fields are there depends on its state."""

    id: str
    object: Literal["request"]
    state: str | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET
    phase: str | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    endpoint: str | msgspec.UnsetType = msgspec.UNSET
    transport: str | msgspec.UnsetType = msgspec.UNSET
    priority: str | msgspec.UnsetType = msgspec.UNSET
    resumable: bool | msgspec.UnsetType = msgspec.UNSET
    attempt: int | msgspec.UnsetType = msgspec.UNSET
    position: int | msgspec.UnsetType | None = msgspec.UNSET
    prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    completion_tokens: int | msgspec.UnsetType = msgspec.UNSET
    max_tokens: int | msgspec.UnsetType = msgspec.UNSET
    created_ms: int | msgspec.UnsetType = msgspec.UNSET
    first_token_ms: int | msgspec.UnsetType | None = msgspec.UNSET
    deadline_ms: int | msgspec.UnsetType | None = msgspec.UNSET
    ended_ms: int | msgspec.UnsetType = msgspec.UNSET
    cancelled: bool | msgspec.UnsetType = msgspec.UNSET
    requests: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class Ticket(Answer):
    ticket: str
    expires_in: float


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Answer):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ResponseUsageIn(Answer):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsageOut(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: ResponseUsageIn
    output_tokens: int
    output_tokens_details: ResponseUsageOut
    total_tokens: int


class Incomplete(Answer):
    reason: str


class Response(Answer):
    """OpenAI's response object, with the request's own parameters echoed."""

    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    incomplete_details: Incomplete | None
    error: dict[str, Any] | None
    previous_response_id: str | None


class Deleted(Answer):
    id: str
    object: str
    deleted: bool
