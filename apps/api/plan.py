"""From a validated body to the jobs that answer it.

The order of checks is the same everywhere: types and ranges (the schema), the
model, fields that must fit together, then the prompt, which costs most.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from apps.accounts.principal import Principal
from apps.api import deps, prompts, upstream
from apps.api import tools as toolkit
from apps.api.errors import ApiError, invalid, unknown_model
from apps.api.jobs import maker_for
from apps.api.schema.base import MAX_CHOICES
from apps.api.schema.generation import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    Sampling,
    StreamOptions,
)
from apps.api.schema.messages import ChatMessage
from inference.config import ModelSpec
from inference.messages import Job
from inference.text.protocol import Tokenizer


@dataclass(slots=True)
class Plan:
    """Everything about one API request once it is known to be sound.

    Attributes:
        id: public id; that of the job where there is one, else jobs add ``-0``, ``-1``, ...
        jobs: one per generated answer, prompt by prompt.
        prompt_tokens: over all prompts, each counted once.
        keep: answers returned per prompt (``n``); fewer than generated with ``best_of``.
        echo: per prompt, the text to put in front.
        show_logprobs: alternatives to show, ``None`` for no log probabilities.
        asked_as: the field in which the caller says how long an answer may be.
        prompt_as: the field in which the caller gave the prompt.
        closing_usage: the last chunk with a choice tells the usage of a stream that has no usage chunk.
    """

    id: str
    model: str
    endpoint: str
    tokenizer: Tokenizer
    jobs: list[Job]
    prompt_tokens: int
    stream: bool = False
    options: StreamOptions = field(default_factory=StreamOptions)
    keep: int = 1
    per_prompt: int = 1
    echo: list[str] = field(default_factory=list)
    show_logprobs: int | None = None
    tools: toolkit.ToolUse | None = None
    asked_as: str = "max_tokens"
    prompt_as: str = "prompt"
    priority: str = "normal"
    timeout: float = 600.0
    resumable: bool = False
    closing_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


def new_id(prefix: str) -> str:
    """A public request id; its prefix says which format its answer has."""
    return f"{prefix}-{secrets.token_hex(12)}"


async def chat(
    body: ChatBody,
    caller: Principal,
    *,
    endpoint: str = "chat",
    request_id: str = "",
    continue_final: bool = False,
    asked_as: str = "",
    prompt_as: str = "messages",
) -> Plan:
    """``POST /v1/chat/completions``.

    Args:
        asked_as: what the caller knows ``max_completion_tokens`` as, where that is another name.
        prompt_as: what the caller knows ``messages`` as.

    Raises:
        ApiError: the request is wrong, or its prompt can not be prepared now.
    """
    _check_generates(body.model, caller)
    _check_stream_options(body.stream, body.stream_options)
    _check_chat(body)
    use = toolkit.resolve(body.tools, body.tool_choice, body.parallel_tool_calls)
    messages = prompts.conversation(body.messages)
    kwargs = dict(body.chat_template_kwargs or {})
    names = [name for name in ("max_tokens", "max_completion_tokens") if getattr(body, name) is not None]
    given = min(names, key=lambda name: getattr(body, name), default="max_tokens")
    asked_as = asked_as or given
    maker = await maker_for(body, body.model, caller, getattr(body, given), body.response_format, use, asked_as)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    forward: list[str] | None = None
    if maker.tokenizer.upstream:
        upstream.check(logprobs=logprobs)
        forward = [upstream.chat_text(body, continue_final)]
    ids = await prompts.in_thread(
        lambda: prompts.chat_ids(maker.tokenizer, messages, use, maker.prompt_limit, kwargs, continue_final)
    )
    request_id = request_id or new_id("chatcmpl")
    jobs = maker.jobs(request_id, [ids], body.n or 1, logprobs, forward, continues=continue_final)
    _check_resumable(body, jobs)
    if body.resumable and use is not None:
        raise invalid("A resumable request goes without tools.", "resumable", "invalid_value")
    return Plan(
        request_id,
        body.model,
        endpoint,
        maker.tokenizer,
        jobs,
        len(ids),
        stream=bool(body.stream),
        options=body.stream_options or StreamOptions(),
        keep=body.n or 1,
        per_prompt=body.n or 1,
        show_logprobs=logprobs,
        tools=use,
        asked_as=asked_as,
        prompt_as=prompt_as,
        **_service(body, caller),
    )


async def completion(body: CompletionBody, caller: Principal) -> Plan:
    """``POST /v1/completions``.

    Raises:
        ApiError: as :func:`chat`.
    """
    _check_generates(body.model, caller)
    _check_stream_options(body.stream, body.stream_options)
    keep = body.n or 1
    count = max(keep, body.best_of or keep)
    _check_completion(body, keep)
    texts = prompts.split(body.prompt)
    if len(texts) * count > MAX_CHOICES:
        raise invalid(
            f"{len(texts)} prompts with {count} answers each are more than the {MAX_CHOICES} answers "
            "that one request may have.",
            "prompt",
            "invalid_value",
        )
    maker = await maker_for(body, body.model, caller, body.max_tokens, body.response_format)
    forward: list[str] | None = None
    if maker.tokenizer.upstream:
        upstream.check(
            logprobs=body.logprobs, echo=body.echo, ranked=count > keep, response_format=body.response_format
        )
        forward = [upstream.prompt_text(text) for text in texts]
    prepared = await prompts.in_thread(
        lambda: [prompts.prompt_ids(maker.tokenizer, text, maker.prompt_limit) for text in texts]
    )
    request_id = new_id("cmpl")
    shown = body.logprobs
    ranked = (shown or 0) if count > keep else shown
    jobs = maker.jobs(request_id, prepared, count, ranked, forward, continues=True)
    _check_resumable(body, jobs)
    echo: list[str] = []
    if body.echo:
        echo = await prompts.in_thread(
            lambda: [
                text if isinstance(text, str) else maker.tokenizer.decode(ids, skip_special=False)
                for text, ids in zip(texts, prepared, strict=True)
            ]
        )
    return Plan(
        request_id,
        body.model,
        "completions",
        maker.tokenizer,
        jobs,
        sum(map(len, prepared)),
        stream=bool(body.stream),
        options=body.stream_options or StreamOptions(),
        keep=keep,
        per_prompt=count,
        echo=echo,
        show_logprobs=shown,
        # Who sends token ids counts tokens, and checks that none was added to the prompt.
        closing_usage=body.stream_options is None and not any(isinstance(text, str) for text in texts),
        **_service(body, caller),
    )


async def generate(body: GenerateBody, caller: Principal, *, endpoint: str = "generate") -> Plan:
    """``POST /generate`` and the WebSocket's ``generate``.

    Raises:
        ApiError: as :func:`chat`.
    """
    model = resolve_model(body.model, caller)
    _check_generates(model, caller)
    check_one_of(body.prompt, body.messages)
    maker = await maker_for(body, model, caller, body.max_tokens, body.response_format)
    forward = [upstream.generate_text(body)] if maker.tokenizer.upstream else None
    if body.prompt is not None:
        if body.chat_template_kwargs:
            raise invalid("A plain prompt uses no chat template.", "chat_template_kwargs", "invalid_value")
        text = body.prompt
        ids = await prompts.in_thread(lambda: prompts.text_ids(maker.tokenizer, text, maker.prompt_limit))
    else:
        messages = prompts.conversation(body.messages or [])
        kwargs = dict(body.chat_template_kwargs or {})
        ids = await prompts.in_thread(
            lambda: prompts.chat_ids(maker.tokenizer, messages, None, maker.prompt_limit, kwargs)
        )
    request_id = new_id("gen")
    return Plan(
        request_id,
        model,
        endpoint,
        maker.tokenizer,
        maker.jobs(request_id, [ids], 1, None, forward, continues=body.prompt is not None),
        len(ids),
        stream=body.stream is not False,
        prompt_as="prompt" if body.prompt is not None else "messages",
        **_service(body, caller),
    )


# --- parts --------------------------------------------------------------------------------


def resolve_model(model: str | None, caller: Principal) -> str:
    """The alias asked for, or the first configured one that generates and that the caller may use.

    Raises:
        ApiError: 404.
    """
    specs = deps.config().model_specs()
    usable = (spec for spec in specs if spec.kind == "generate" and caller.may_use(spec.alias))
    alias = model or next(usable, specs[0]).alias
    check_model(alias, caller)
    return alias


def check_one_of(prompt: str | None, messages: Sequence[ChatMessage] | None) -> None:
    """Exactly one of the two says what to go on from.

    Raises:
        ApiError: 400.
    """
    if prompt is None and messages is None:
        raise invalid("Missing required parameter: 'prompt' (or 'messages').", "prompt", "missing_required_parameter")
    if prompt is not None and messages is not None:
        raise invalid("Give either prompt or messages, not both.", "prompt", "invalid_value")


def check_model(model: str, caller: Principal) -> ModelSpec:
    """The configured model, if the caller may use it.

    Raises:
        ApiError: 404.
    """
    spec = deps.model_spec(model)
    if spec is None or not caller.may_use(model):
        raise unknown_model(model)
    return spec


def _check_generates(model: str, caller: Principal) -> None:
    if check_model(model, caller).kind != "generate":
        raise invalid(
            f"The model {model!r} makes embeddings and no text; use /v1/embeddings.", "model", "model_not_supported"
        )


def _check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    if options is not None and not stream:
        raise invalid("stream_options needs stream: true.", "stream_options", "invalid_value")
    if options is not None:
        check_obfuscation(options.include_obfuscation)


def check_obfuscation(wanted: bool | None) -> None:
    """Refuse to pad events; ``false`` is what happens anyway.

    Raises:
        ApiError: 400.
    """
    if wanted:
        raise invalid("Nothing is padded.", "stream_options.include_obfuscation", "unsupported_parameter")


def _check_chat(body: ChatBody) -> None:
    if body.store:
        raise invalid("Answers are not stored: store can only be false.", "store", "unsupported_parameter")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true.", "top_logprobs", "invalid_value")


def _check_completion(body: CompletionBody, keep: int) -> None:
    if body.best_of is not None and body.best_of < keep:
        raise invalid("best_of is less than n.", "best_of", "invalid_value")
    if body.best_of is not None and body.best_of > keep and body.stream:
        text = "The best answers are known at the end only: best_of above n can not be streamed."
        raise invalid(text, "best_of", "invalid_value")
    if body.echo and body.logprobs is not None:
        text = "Log probabilities of the prompt are not available: echo goes without logprobs."
        raise invalid(text, "echo", "invalid_value")
    if body.echo and body.resumable:
        text = "A resumable request goes without echo: whoever reads on in it gets the answer alone."
        raise invalid(text, "echo", "invalid_value")


def _check_resumable(body: Sampling, jobs: list[Job]) -> None:
    if body.resumable and len(jobs) > 1:
        raise invalid("A resumable request has one answer.", "resumable", "invalid_value")


def _service(body: Sampling, caller: Principal) -> dict[str, Any]:
    """Priority, deadline and resumability, within what caller and operator allow."""
    priority, timeout = service_of(body.priority, body.timeout, caller)
    return {"priority": priority, "timeout": timeout, "resumable": bool(body.resumable)}


def service_of(priority: str | None, timeout: float | None, caller: Principal) -> tuple[str, float]:
    """Priority and deadline (seconds), within what caller and operator allow.

    Raises:
        ApiError: 400 a timeout beyond the operator's, 403 a priority that the key may not have.
    """
    longest = deps.config().request_timeout
    if timeout is not None and timeout > longest:
        raise invalid(f"timeout is at most {longest:g} seconds here.", "timeout", "invalid_value")
    if priority == "high" and not caller.may("admin"):
        raise ApiError(
            403, "Priority high needs a key with the admin scope.", param="priority", code="priority_not_allowed"
        )
    return priority or "normal", timeout or longest
