"""The engine that makes vectors: right, alone and in a batch; bounded; nothing left behind."""

from __future__ import annotations

import asyncio
import json
import struct
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from inference.config import Config, ModelSpec, parse_models
from inference.engine import embedding
from inference.engine.base import Engine
from inference.engine.embedding import EmbeddingEngine, Recipe, read_recipe
from inference.engine.factory import make_engine, make_tokenizer
from inference.errors import EngineDied, ModelUnavailable, Overloaded, TooLarge
from inference.messages import Job, SamplingParams
from tests.engine.rig import Rig
from tests.minilm import minilm_folder
from tests.tokenizers import write_model_folder

SIZE, CONTEXT = 32, 24


def write_tiny_encoder(folder: Path, modules: list[str] | None = None, **pooling: Any) -> str:
    """A BERT of a few thousand random weights, with or without a description of its vectors."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=64,
        hidden_size=SIZE,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
    )
    BertModel(config).save_pretrained(folder)
    if modules is not None:
        entries = [{"path": name if name == "Pooling" else "", "type": f"x.{name}"} for name in modules]
        (folder / "modules.json").write_text(json.dumps(entries))
        (folder / "Pooling").mkdir()
        (folder / "Pooling/config.json").write_text(json.dumps(pooling))
    return str(folder)


def job(name: str, ids: list[int]) -> Job:
    return Job(name, "tiny", ids, SamplingParams(max_tokens=0))


def vector(text: str) -> list[float]:
    raw = b64decode(text)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def expected(folder: str, ids: list[int], pooling: str = "mean", normalize: bool = True) -> list[float]:
    """What the model gives for one text on its own, without this engine."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        tokens = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    out = {"mean": tokens.mean(0), "cls": tokens[0], "max": tokens.max(0).values}[pooling]
    return [float(x) for x in (out / out.norm() if normalize else out)]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    engine = EmbeddingEngine(write_tiny_encoder(tmp_path), alias="tiny", device="cpu", config=Config(max_running=40))
    rig = await Rig(engine).load()
    yield rig
    await engine.close()


async def test_vectors_are_the_same_alone_and_in_a_batch(rig: Rig, tmp_path: Path) -> None:
    assert isinstance(rig.engine, Engine)
    assert (rig.info.kind, rig.info.context_length, rig.info.slots) == ("embed", CONTEXT, 40)
    assert rig.info.dimensions == len(expected(str(tmp_path), [1]))
    prompts = [[(7 * i + j) % 64 for j in range(1 + i % CONTEXT)] for i in range(40)]
    answers = await rig.run_all([job(f"j{i}", ids) for i, ids in enumerate(prompts)])
    assert rig.engine.stats().steps < len(prompts)
    for ids, answer in list(zip(prompts, answers, strict=True))[::7]:
        assert answer.finish == "stop"
        assert answer.ids == []
        (output,) = answer.outputs
        assert output.text is not None
        assert vector(output.text) == pytest.approx(expected(str(tmp_path), ids), abs=1e-5)
    stats = rig.engine.stats()
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.waiting == stats.running == 0
    assert rig.engine.free_slots() == 40


@pytest.mark.parametrize(
    ("modules", "settings", "pooling", "normalize"),
    [
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True}, "mean", False),
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode_cls_token": True}, "cls", True),
        (["Transformer", "Pooling"], {"pooling_mode": "max"}, "max", False),
    ],
)
async def test_the_folder_says_what_the_vector_is(
    tmp_path: Path, modules: list[str], settings: dict[str, Any], pooling: str, normalize: bool
) -> None:
    folder = write_tiny_encoder(tmp_path, modules, **settings)
    engine = EmbeddingEngine(folder, alias="tiny", device="cpu", config=Config())
    rig = await Rig(engine).load()
    try:
        long, short = await rig.run_all([job("a", list(range(20))), job("b", [5, 6, 7])])
        assert short.outputs[0].text is not None
        assert vector(short.outputs[0].text) == pytest.approx(expected(folder, [5, 6, 7], pooling, normalize), abs=1e-5)
        assert long.finish == "stop"
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("modules", "settings"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_mean_tokens": True}),
        (["Transformer", "Pooling"], {"pooling_mode_lasttoken": True}),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}),
    ],
)
def test_what_is_not_offered_is_refused_at_load(tmp_path: Path, modules: list[str], settings: dict[str, Any]) -> None:
    with pytest.raises(ModelUnavailable):
        read_recipe(write_tiny_encoder(tmp_path, modules, **settings))


async def test_limits_and_aborts(rig: Rig) -> None:
    for ids in ([], [1] * (CONTEXT + 1)):
        with pytest.raises(TooLarge):
            rig.engine.submit(job("x", ids))
    assert not rig.engine.fits(job("x", [1] * (CONTEXT + 1)))
    answers = [rig.submit(job(f"j{i}", [i])) for i in range(40)]
    with pytest.raises(Overloaded):
        rig.engine.submit(job("more", [1]))
    rig.engine.abort("j0")  # waiting
    rig.engine.abort("nobody")
    assert rig.engine.free_slots() == 1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rig.engine.abort("j1")  # now in the pass
    await answers[-1].finished()
    assert [answer.finish for answer in answers[:3]] == [None, None, "stop"]
    assert rig.engine.free_slots() == 40


async def test_a_pass_is_bounded_in_tokens(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "BATCH_TOKENS", 50)
    before = rig.engine.stats().steps
    answers = await rig.run_all([job(f"j{i}", [1] * 20) for i in range(6)])
    assert {answer.finish for answer in answers} == {"stop"}
    assert rig.engine.stats().steps - before == 3


async def test_a_failing_pass_ends_the_engine(rig: Rig) -> None:
    rig.engine.submit(job("bad", [10**6]))  # beyond the vocabulary: the servers check that
    assert await asyncio.wait_for(rig.death, 30)
    with pytest.raises(EngineDied):
        rig.engine.submit(job("late", [1]))


async def test_a_folder_without_weights_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    engine = EmbeddingEngine(str(tmp_path), alias="tiny", device="cpu", config=Config())
    with pytest.raises(ModelUnavailable):
        await Rig(engine).load()
    await engine.close()


def test_settings_and_tokenizer(tmp_path: Path) -> None:
    (spec,) = parse_models("v=embed:/models/v")
    assert (spec, spec.kind) == (ModelSpec("v", "embed", "/models/v"), "embed")
    with pytest.raises(ModelUnavailable):
        make_engine(spec, "cpu", Config())
    (write_model_folder(tmp_path) / "config.json").write_text('{"max_position_embeddings": 64}')
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    local = ModelSpec("v", "embed", str(tmp_path))
    assert make_tokenizer(local, Config()).context_length == 48
    assert make_tokenizer(local, Config(context_length=32)).context_length == 32


@pytest.mark.model
async def test_the_real_model() -> None:
    folder = minilm_folder()
    assert read_recipe(folder) == Recipe("mean", True, 256)
    spec = ModelSpec("minilm", "embed", folder)
    tokenizer = make_tokenizer(spec, Config())
    engine = make_engine(spec, "cpu", Config())
    rig = await Rig(engine).load()
    try:
        texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell by three percent."]
        ids = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
        answers = await rig.run_all([job(f"j{i}", each) for i, each in enumerate(ids)])
        cat, kitten, market = (vector(answer.outputs[0].text or "") for answer in answers)
    finally:
        await engine.close()
    assert cat == pytest.approx(expected(folder, ids[0]), abs=1e-5)
    near, far = (sum(a * b for a, b in zip(cat, other, strict=True)) for other in (kitten, market))
    assert near > 0.5 > 0.2 > far
