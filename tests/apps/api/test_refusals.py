"""What the core refuses is told in the words of the endpoint that was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from apps.accounts.principal import Principal
from apps.api import deps, embeddings, plan, responses
from apps.api.errors import ApiError
from apps.api.generate import decode_chat, decode_completion, decode_generate
from apps.api.generation import Generation
from apps.api.schema.embeddings import EmbeddingBody
from inference.config import Config
from inference.engine.scripted_tokenizer import ScriptedTokenizer
from inference.errors import TooLarge
from inference.messages import Job, ModelInfo, SamplingParams

CALLER = Principal("key:ab", None, False, frozenset({"generate", "read"}), None, "a key")


class Full:
    """A gateway whose workers hold less than was known when the prompt was prepared."""

    id, redis, config = "s", None, SimpleNamespace(redis_prefix="sluice:")

    def models(self) -> dict[str, ModelInfo]:
        return {"vectors": ModelInfo("vectors", "embed", 256, 256, 4, kind="embed", dimensions=384)}

    async def retry_after(self, model: str) -> float:
        return 1.0

    @asynccontextmanager
    async def request(self, spec: object) -> AsyncIterator[None]:
        raise TooLarge("Prompt and answer need 20 tokens; at most 10 can be served.")
        yield


@pytest.fixture(autouse=True)
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Full()

    async def tokenizer(alias: str) -> ScriptedTokenizer:
        return ScriptedTokenizer()

    async def offload(work: Any) -> Any:
        return work()

    monkeypatch.setattr(deps, "gateway", lambda: gateway)
    monkeypatch.setattr(deps, "config", lambda: Config(models="demo=scripted vectors=embed:/nowhere"))
    monkeypatch.setattr(deps, "tokenizer", tokenizer)
    monkeypatch.setattr(deps, "offload", offload)


SAY = b'"messages": [{"role": "user", "content": "x"}]'
ASKED: dict[str, tuple[Any, str]] = {
    "chat": (lambda: plan.chat(decode_chat(b'{"model": "demo", ' + SAY + b"}"), CALLER), "messages"),
    "completions": (lambda: plan.completion(decode_completion(b'{"model": "demo", "prompt": "x"}'), CALLER), "prompt"),
    "generate": (lambda: plan.generate(decode_generate(b'{"prompt": "x"}'), CALLER), "prompt"),
    "generate from messages": (lambda: plan.generate(decode_generate(b"{" + SAY + b"}"), CALLER), "messages"),
    "responses": (
        lambda: responses.planned(
            responses.decode_response(b'{"model": "demo", "input": "x"}'), responses.messages_of("x"), CALLER
        ),
        "input",
    ),
}


@pytest.mark.parametrize("way", ASKED)
async def test_a_prompt_that_no_worker_can_hold_is_named_as_the_endpoint_names_it(way: str) -> None:
    ask, param = ASKED[way]
    with pytest.raises(ApiError) as refused:
        async with Generation(await ask(), CALLER, client="", transport="json"):
            pass
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert refused.value.param == param


async def test_a_text_that_no_worker_can_hold() -> None:
    work = embeddings.Work("e", "demo", [Job("e", "demo", [1], SamplingParams(max_tokens=0, seed=0))], "normal", 1e9)
    with pytest.raises(ApiError) as refused:
        await embeddings.compute(work, CALLER, "")
    assert (refused.value.status, refused.value.param) == (400, "input")


@pytest.mark.parametrize(("dimensions", "refused"), [(384, False), (385, True), (None, False)])
async def test_more_dimensions_than_the_model_has_are_refused_before_anything_is_computed(
    dimensions: int | None, refused: bool
) -> None:
    asked = EmbeddingBody(model="vectors", input="x", dimensions=dimensions)
    try:
        await embeddings.prepare(asked, CALLER)
    except ApiError as exc:
        assert refused
        assert (exc.status, exc.param) == (400, "dimensions")
    else:
        assert not refused
