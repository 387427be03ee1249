"""The space at the very start of an answer, with vocabularies that mark the start of words by it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from apps.accounts.principal import Principal
from apps.api import deps, plan, service
from apps.api.generate import decode_chat, decode_completion, decode_generate
from apps.api.render.base import text_logprobs
from inference.config import Config
from inference.engine.base import EngineOutput
from inference.messages import Job, TokenLogprob, decode_frame
from inference.store.records import Claim
from inference.worker.sequence import Sequence
from tests.tokenizers import small_tokenizer

CALLER = Principal("key:ab", None, False, frozenset({"generate", "read"}), None, "a key")
TOKENIZER = small_tokenizer("sentencepiece")
SAY: list[dict[str, Any]] = [{"role": "user", "content": "the"}]


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def models(self) -> dict[str, Any]:
            return {}

    async def tokenizer(alias: str) -> Any:
        return TOKENIZER

    async def offload(work: Any) -> Any:
        return work()

    monkeypatch.setattr(deps, "gateway", Nothing)
    monkeypatch.setattr(deps, "config", lambda: Config(models="demo=scripted"))
    monkeypatch.setattr(deps, "tokenizer", tokenizer)
    monkeypatch.setattr(deps, "offload", offload)


def answer(job: Job, ids: list[int]) -> str:
    """What the worker makes of the ids that its engine gave."""
    claim = Claim(job.id, 1, job, "s", [])
    frame = Sequence(claim, TOKENIZER).take(EngineOutput(job.id, ids, finish="length"))
    assert frame is not None
    return decode_frame(frame.frame).text


async def test_the_rest_of_a_prompt_begins_with_it_and_an_answer_of_its_own_does_not() -> None:
    ids = TOKENIZER.encode("the cat", trusted=False)
    assert TOKENIZER.visible_bytes(ids[0]).startswith(b" ")

    def asked(**fields: Any) -> bytes:
        return msgspec.json.encode({"model": "demo", **fields})

    rest = [
        await plan.completion(decode_completion(asked(prompt="the")), CALLER),
        await plan.completion(decode_completion(asked(prompt=ids)), CALLER),
        await plan.generate(decode_generate(asked(prompt="the")), CALLER),
    ]
    for made in rest:
        assert answer(made.jobs[0], ids) == " the cat"
    own = [
        await plan.chat(decode_chat(asked(messages=SAY)), CALLER),
        await plan.generate(decode_generate(asked(messages=SAY)), CALLER),
    ]
    for made in own:
        assert answer(made.jobs[0], ids) == "the cat"
    begun = [*SAY, {"role": "assistant", "content": "the"}]
    assert answer(await service.chat_job("r", "demo", begun, continue_final=True), ids) == " the cat"


async def test_the_places_of_tokens_are_those_of_the_text() -> None:
    made = await plan.completion(decode_completion(b'{"model": "demo", "prompt": "the", "logprobs": 0}'), CALLER)
    ids = TOKENIZER.encode("the cat \U0001f642 sat", trusted=False)
    text = answer(made.jobs[0], ids)
    shown, end = text_logprobs(TOKENIZER, [TokenLogprob(token, -1.0) for token in ids], 0, 0)
    assert end == len(text)
    for token, at in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[at : at + len(token)] == token
