"""The engine on the real default model, in float32 on a CPU."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inference.config import Config
from inference.engine.transformers import TransformersEngine
from inference.messages import Grammar
from inference.models.tokenizer import ModelTokenizer
from tests.engine.rig import Rig, job

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
LENGTH = 24


@pytest.fixture
async def rig(model_folder: str) -> AsyncIterator[Rig]:
    config = Config(max_running=8, cache_tokens=8192)
    rig = await Rig(TransformersEngine(model_folder, alias="real", device="cpu", config=config)).load()
    yield rig
    await rig.engine.close()


async def test_answers_are_the_same_alone_in_a_batch_and_resumed(rig: Rig, model_folder: str) -> None:
    tokenizer = ModelTokenizer(model_folder)

    def ask(text: str) -> list[int]:
        return tokenizer.render_chat([{"role": "user", "content": text}])

    cases: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "seed": 4, "top_p": 0.95},
        {"temperature": 1.0, "seed": 5},
        {"repetition_penalty": 1.2},
    ]
    jobs = [
        job(f"c{n}", ask(f"Name {n + 3} animals that live in water."), max_tokens=LENGTH, **params)
        for n, params in enumerate(cases)
    ]
    alone = [await rig.run(each, limit=200) for each in jobs]
    together = await rig.run_all([*jobs, job("mate", [100] * 300, max_tokens=LENGTH)], limit=200)
    for one, other in zip(alone, together, strict=False):
        assert one.ids == other.ids
        assert "\ufffd" not in tokenizer.decode(one.ids)
    halves = [rig.submit(each, one.ids[: 7 + n]) for n, (each, one) in enumerate(zip(jobs, alone, strict=True))]
    for n, (one, half) in enumerate(zip(alone, halves, strict=True)):
        await half.finished(200)
        assert one.ids[: 7 + n] + half.ids == one.ids


async def test_prefix_and_grammar_with_the_real_vocabulary(rig: Rig, model_folder: str) -> None:
    tokenizer = ModelTokenizer(model_folder)
    prefix = tokenizer.encode("The tide comes in and the tide goes out. " * 70)[:600]
    await rig.run(job("first", [*prefix, 101], max_tokens=2), limit=200)
    second = await rig.run(job("second", [*prefix, 102], max_tokens=2), limit=200)
    assert second.outputs[0].cached == 576
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = await rig.run(
        job("json", tokenizer.encode("A city:"), max_tokens=40, grammar=Grammar("json_schema", json.dumps(schema))),
        limit=200,
    )
    value = json.loads(tokenizer.decode(answer.ids))
    assert value["city"] in ("Paris", "Rome") and isinstance(value["big"], bool)
    assert answer.finish == "stop"
