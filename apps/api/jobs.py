"""Turning prepared prompts into jobs, with one request's parameters and limits."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from apps.accounts.principal import Principal
from apps.api import deps, structured
from apps.api import tools as toolkit
from apps.api.errors import invalid
from apps.api.schema.base import MAX_INT
from apps.api.schema.generation import ResponseFormat, Sampling, stops
from inference.messages import Grammar, Job, SamplingParams
from inference.text.protocol import Tokenizer

SEEDS = 2**63


@dataclass(slots=True)
class Maker:
    """Turns prompts into jobs with one request's parameters."""

    model: str
    tokenizer: Tokenizer
    context: int
    asked: int | None
    asked_as: str
    default: int
    params: Callable[[int, int], SamplingParams]

    @property
    def prompt_limit(self) -> int:
        """Prompt tokens that leave room for one token of answer."""
        return self.context - 1

    def jobs(
        self,
        request_id: str,
        ids: list[list[int]],
        count: int,
        logprobs: int | None,
        forward: list[str] | None,
        *,
        continues: bool,
    ) -> list[Job]:
        """The jobs of ``count`` answers to each prompt.

        Args:
            forward: per prompt, what an upstream server is sent.
            continues: the answer is the rest of the prompt's text, not a text of its own.

        Raises:
            ApiError: prompt and answer together do not fit.
        """
        single = len(ids) * count == 1
        out = []
        for number in range(len(ids) * count):
            prompt = ids[number // count]
            params = self.params(self._room(len(prompt)), number)
            if logprobs is not None:
                params = msgspec.structs.replace(params, logprobs=logprobs)
            job_id = request_id if single else f"{request_id}-{number}"
            text = forward[number // count] if forward is not None else None
            out.append(Job(job_id, self.model, prompt, params, prompt_text=text, continues=continues))
        return out

    def _room(self, prompt: int) -> int:
        left = self.context - prompt
        if self.asked is None:
            return min(left, self.default) if self.default else left
        if self.asked > left:
            raise invalid(
                f"The prompt has {prompt} tokens and the answer may have {self.asked}: together "
                f"{prompt + self.asked} of at most {self.context}. Shorten the prompt, lower {self.asked_as}, "
                f"or leave {self.asked_as} out.",
                self.asked_as,
                "context_length_exceeded",
            )
        return self.asked


async def maker_for(
    body: Sampling,
    model: str,
    caller: Principal,
    asked: int | None,
    response_format: ResponseFormat | None,
    use: toolkit.ToolUse | None = None,
    asked_as: str = "max_tokens",
) -> Maker:
    config = deps.config()
    cap = config.max_tokens_limit
    if asked is not None and cap and asked > cap:
        raise invalid(f"{asked_as} is at most {cap} here.", asked_as, "invalid_value")
    tokenizer = await deps.tokenizer(model)
    context = context_limit(model, tokenizer)
    grammar: Grammar | None = None
    if not tokenizer.upstream:  # which has its own vocabulary, and its own way to hold answers to a schema
        _check_ids(body, tokenizer.vocab_size)
        grammar = structured.constraint(response_format, use)
    if grammar is not None:
        await structured.check(grammar)
    own = (quota.max_tokens for quota in caller.quotas)
    default = min(filter(None, (config.default_max_tokens, cap, *own)), default=0)
    least = body.min_tokens or 0
    if asked is not None and least > asked:
        raise invalid(f"min_tokens is more than {asked_as}.", "min_tokens", "invalid_value")
    seed = body.seed if body.seed is not None else secrets.randbelow(SEEDS)

    def params(room: int, number: int) -> SamplingParams:
        if least > room:
            raise invalid(f"min_tokens is more than the {room} tokens that are left.", "min_tokens", "invalid_value")
        return SamplingParams(
            max_tokens=room,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            min_p=body.min_p or 0.0,
            seed=(seed + number) % SEEDS,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=body.logit_bias or {},
            stop=stops(body.stop),
            stop_token_ids=body.stop_token_ids or [],
            ignore_eos=bool(body.ignore_eos),
            min_tokens=least,
            grammar=grammar,
        )

    return Maker(model, tokenizer, context, asked, asked_as, default, params)


def context_limit(model: str, tokenizer: Tokenizer) -> int:
    """Longest prompt plus answer, tokens: the model's, or less where its workers' cache is smaller."""
    limit = tokenizer.context_length or MAX_INT
    served = deps.gateway().models().get(model)
    if served is not None:
        limit = min(limit, served.context_length, served.capacity_tokens)
    return limit


def _check_ids(body: Sampling, size: int) -> None:
    for token_id in body.logit_bias or ():
        if not 0 <= token_id < size:
            raise invalid(f"A token id is outside of the vocabulary (0 to {size - 1}).", "logit_bias", "invalid_value")
    for token_id in body.stop_token_ids or ():
        if token_id >= size:
            raise invalid(
                f"A token id is outside of the vocabulary (0 to {size - 1}).", "stop_token_ids", "invalid_value"
            )
