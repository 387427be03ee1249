"""The fields that every way of generating shares, and the bodies of the generation endpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from apps.api.schema.base import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_INT,
    MAX_LOGPROBS,
    MAX_STOPS,
    Bias,
    Body,
    Part,
    Penalty,
    StopText,
    TokenId,
    Tokens,
    Unit,
    about,
)
from apps.api.schema.messages import ChatMessage, Tool, ToolChoice

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Scalar = str | int | float | bool | None


class StreamOptions(Part, kw_only=True):
    """What a stream carries beside the answer."""

    include_usage: Annotated[bool, about("One more chunk before [DONE] with choices [] and the usage.")] | None = None
    include_obfuscation: Annotated[bool, about("false only: nothing is padded.")] | None = None
    include_queue: (
        Annotated[
            bool,
            about(
                "While waiting: events named queue, with the position and an estimate in seconds. "
                "Clients that only know OpenAI's events should not ask for them."
            ),
        ]
        | None
    ) = None


class TextFormat(Part, kw_only=True, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(Part, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object; the decoder allows nothing else."""


class JsonSchema(Part, kw_only=True):
    """A named JSON schema."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Part, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that obeys a schema; enforced while decoding, whether ``strict`` is set or not."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class Sampling(Body, kw_only=True):
    """How to sample, when to stop, and how the service treats the request."""

    max_tokens: (
        Annotated[
            Tokens,
            about(
                "Upper bound of generated tokens. Absent or null: what is left of the context (or the operator's "
                "default). More than fits is refused with context_length_exceeded."
            ),
        ]
        | None
    ) = None
    temperature: Annotated[float, about("0 is greedy.", ge=0.0, le=2.0)] | None = None
    top_p: Annotated[Unit, about("Nucleus sampling; 1 is off, 0 acts greedy.")] | None = None
    top_k: Annotated[int, about("Only the k likeliest tokens; 0 or -1 is off.", ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[Unit, about("Drops tokens below this share of the likeliest one; 0 is off.")] | None = None
    seed: (
        Annotated[
            int,
            about(
                "Same seed, same prompt, same parameters: same answer. Choice i of several uses seed + i.",
                ge=-(2**63),
                le=2**63 - 1,
            ),
        ]
        | None
    ) = None
    presence_penalty: Annotated[Penalty, about("Subtracted from tokens that the answer already has.")] | None = None
    frequency_penalty: Annotated[Penalty, about("Subtracted once per earlier occurrence in the answer.")] | None = None
    repetition_penalty: (
        Annotated[float, about("Divides the logits of tokens seen in prompt or answer; 1 is off.", ge=0.01, le=10.0)]
        | None
    ) = None
    logit_bias: (
        Annotated[Bias, about("Token id to bias; ids must be in the vocabulary.", max_length=MAX_BIAS)] | None
    ) = None
    stop: (
        Annotated[
            StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)],
            about("Texts that end the answer; never part of it."),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], about("Token ids that end the answer.", max_length=MAX_STOPS)] | None = (
        None
    )
    ignore_eos: Annotated[bool, about("Go on to max_tokens, past the model's own end.")] | None = None
    min_tokens: (
        Annotated[
            int,
            about("Hold off the end (own, stop, stop_token_ids) until then; at most max_tokens.", ge=0, le=MAX_INT),
        ]
        | None
    ) = None
    priority: Annotated[Literal["low", "normal", "high"], about("Place in the queue.")] | None = None
    timeout: (
        Annotated[
            float,
            about(
                "Seconds from acceptance to the last token, in the queue and in decode; at most the operator's limit.",
                gt=0.0,
                le=86400.0,
            ),
        ]
        | None
    ) = None
    resumable: (
        Annotated[
            bool,
            about(
                "The answer goes on without its client for a grace time; stream events carry ids for Last-Event-ID "
                "at /v1/requests/{id}/events."
            ),
        ]
        | None
    ) = None


class Choices(Sampling, kw_only=True):
    """What OpenAI's two classic endpoints share on top."""

    model: Annotated[Name, about("Alias of a served model.")]
    stream: Annotated[bool, about("Server-sent events instead of one body.")] | None = None
    stream_options: Annotated[StreamOptions, about("Only with stream: true.")] | None = None
    n: Annotated[int, about("Answers per prompt.", ge=1, le=MAX_CHOICES)] | None = None
    user: Annotated[str, about("Accepted without effect.", max_length=1024)] | None = None
    metadata: Annotated[dict[str, str], about("Accepted without effect.", max_length=16)] | None = None
    response_format: Annotated[ResponseFormat, about("text, json_object or json_schema, enforced.")] | None = None


class ChatBody(Choices, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], about("The conversation so far.", min_length=1, max_length=4096)]
    max_completion_tokens: (
        Annotated[Tokens, about("As max_tokens; where both are given the smaller one holds.")] | None
    ) = None
    logprobs: Annotated[bool, about("Log probability of each token of the answer.")] | None = None
    top_logprobs: (
        Annotated[int, about("Alternatives per token; needs logprobs: true.", ge=0, le=MAX_LOGPROBS)] | None
    ) = None
    tools: Annotated[list[Tool], about("Functions the model may call.", max_length=128)] | None = None
    tool_choice: (
        Annotated[ToolChoice, about("none, auto, required, or one function; the last two are enforced.")] | None
    ) = None
    parallel_tool_calls: Annotated[bool, about("false: at most one call per answer.")] | None = None
    chat_template_kwargs: (
        Annotated[dict[str, Scalar], about("Variables for the model's chat template.", max_length=16)] | None
    ) = None
    store: Annotated[bool, about("false only.")] | None = None
    service_tier: Annotated[Literal["auto", "default"], about("auto or default only.")] | None = None
    modalities: Annotated[list[Literal["text"]], about('["text"] only.', min_length=1, max_length=1)] | None = None
    safety_identifier: Annotated[str, about("Accepted without effect.", max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, about("Accepted without effect.", max_length=1024)] | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    moderation: None = None
    prediction: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


Prompt = str | list[str | int | list[int]]


class CompletionBody(Choices, kw_only=True):
    """``POST /v1/completions``."""

    prompt: Annotated[
        Prompt,
        about(
            "A text, a list of texts, a list of token ids, or a list of such lists. Trusted: control tokens typed "
            "in it are control tokens."
        ),
    ]
    echo: Annotated[bool, about("Put the prompt in front of the answer. Not with logprobs or resumable.")] | None = None
    best_of: (
        Annotated[
            int,
            about(
                "Generate this many per prompt and return the n with the highest mean log probability. Not with "
                "stream where it exceeds n.",
                ge=1,
                le=MAX_CHOICES,
            ),
        ]
        | None
    ) = None
    logprobs: Annotated[int, about("Alternatives per token, beside the chosen one.", ge=0, le=MAX_LOGPROBS)] | None = (
        None
    )
    suffix: None = None


class GenerateBody(Sampling, kw_only=True):
    """``POST /generate``: a plain prompt in, a stream of events out."""

    prompt: Annotated[str, about("Trusted text: control tokens typed in it are control tokens.")] | None = None
    messages: (
        Annotated[list[ChatMessage], about("Instead of prompt: a conversation.", min_length=1, max_length=4096)] | None
    ) = None
    model: Annotated[Name, about("Alias of a served model; absent: the first one that generates.")] | None = None
    stream: Annotated[bool, about("false: one JSON body instead of events.")] | None = None
    response_format: Annotated[ResponseFormat, about("text, json_object or json_schema, enforced.")] | None = None
    chat_template_kwargs: (
        Annotated[dict[str, Scalar], about("Variables for the model's chat template; with messages.", max_length=16)]
        | None
    ) = None


class TokenizeBody(Body, kw_only=True):
    """``POST /tokenize``."""

    model: Annotated[Name, about("Alias of a served model; absent: the first one.")] | None = None
    prompt: Annotated[str, about("A text.")] | None = None
    messages: (
        Annotated[list[ChatMessage], about("Instead of prompt: a conversation.", min_length=1, max_length=4096)] | None
    ) = None
    tools: Annotated[list[Tool], about("With messages.", max_length=128)] | None = None
    chat_template_kwargs: Annotated[dict[str, Scalar], about("With messages.", max_length=16)] | None = None
    add_special_tokens: Annotated[bool, about("Default true; for prompt only.")] | None = None
    return_token_strs: Annotated[bool, about("Also the text of each token.")] | None = None


class DetokenizeBody(Body, kw_only=True):
    """``POST /detokenize``."""

    model: Annotated[Name, about("Alias of a served model; absent: the first one.")] | None = None
    tokens: Annotated[list[TokenId], about("Token ids.", max_length=1_000_000)]


def stops(value: str | list[str] | None) -> list[str]:
    """``stop`` in its one normal form."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(dict.fromkeys(value))
