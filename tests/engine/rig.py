"""A tiny random model and a rig that drives an engine and collects what it gives."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inference.config import Config
from inference.engine.base import Engine, EngineOutput
from inference.messages import Job, ModelInfo, SamplingParams, TokenLogprob
from tests.support import eventually

EOS = 256
PAD = 257
VOCABULARY = 288
"""Width of the tiny model's logits; its tokenizer knows 258 ids: the bytes, EOS and a pad."""
CONTEXT = 2048
DEVICE = os.environ.get("SLUICE_TEST_DEVICE", "cpu")
"""Where the engine runs; ``scripts/gpu_check.py`` sets it."""


def write_tiny_model(folder: Path, *, layers: int = 2, seed: int = 7) -> str:
    """A llama of a few thousand weights over bytes: every text is possible, none is likely."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    letters = _byte_letters()
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    return str(folder)


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


def text_of(ids: Sequence[int]) -> str:
    """The text of tiny-model ids."""
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def job(name: str, prompt: Sequence[int] | str = "hello", **params: Any) -> Job:
    """A job with greedy defaults; ``params`` are those of SamplingParams."""
    ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    params = {"max_tokens": 8, "temperature": 0.0, **params}
    return Job(name, "tiny", ids, SamplingParams(**params))


class Answer:
    """What came for one submission."""

    def __init__(self) -> None:
        self.outputs: list[EngineOutput] = []
        self.steps: list[int] = []
        self.changed = asyncio.Event()

    @property
    def ids(self) -> list[int]:
        return [i for output in self.outputs for i in output.ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for output in self.outputs for entry in output.logprobs or []]

    @property
    def finish(self) -> str | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def error(self) -> str | None:
        return self.outputs[-1].error if self.outputs else None

    async def wait(self, condition: Callable[[Answer], bool], limit: float = 60.0) -> Answer:
        async with asyncio.timeout(limit):
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()
        return self

    async def finished(self, limit: float = 60.0) -> Answer:
        return await self.wait(lambda answer: answer.finish is not None, limit)

    async def tokens(self, count: int, limit: float = 60.0) -> Answer:
        return await self.wait(lambda answer: len(answer.ids) >= count or answer.finish is not None, limit)


class Rig:
    """Owns an engine for one test. ``calls`` counts the sink's calls."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}
        self.calls = 0
        self.death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.deaths = 0
        self.info: ModelInfo

    async def load(self) -> Rig:
        self.info = await self.engine.load(self._sink, self._died)
        return self

    def _sink(self, outputs: Sequence[EngineOutput]) -> None:
        self.calls += 1
        for output in outputs:
            answer = self.answers[output.id]
            assert answer.finish is None, "an output after the last one"
            answer.outputs.append(output)
            answer.steps.append(self.calls)
            answer.changed.set()

    def _died(self, error: BaseException) -> None:
        self.deaths += 1
        if not self.death.done():
            self.death.set_result(error)

    def submit(self, job: Job, resumed: Sequence[int] = ()) -> Answer:
        answer = self.answers[job.id] = Answer()
        self.engine.submit(job, resumed)
        return answer

    async def run(self, job: Job, resumed: Sequence[int] = (), limit: float = 60.0) -> Answer:
        return await self.submit(job, resumed).finished(limit)

    async def run_all(self, jobs: Sequence[Job], limit: float = 100.0) -> list[Answer]:
        """Submit each job as soon as it fits; give back their answers in order."""
        answers: list[Answer] = []
        async with asyncio.timeout(limit):
            for each in jobs:
                while not self.engine.fits(each):
                    open_ones = [answer for answer in answers if answer.finish is None]
                    await open_ones[0].finished(limit)
                answers.append(self.submit(each))
            for answer in answers:
                await answer.finished(limit)
        return answers

    async def quiet(self, limit: float = 10.0) -> None:
        """Wait until the engine holds nothing."""

        def empty() -> bool:
            stats = self.engine.stats()
            return not (stats.running or stats.waiting or stats.blocks_used)

        await eventually(empty, limit, every=0.01, what="the engine holds nothing")
        assert self.engine.free_slots() == self.engine.stats().slots


def tiny_config(**changes: Any) -> Config:
    """Small and quick: 8 slots, a cache for 4,096 tokens; float32 everywhere, for exact comparisons."""
    return Config(**{"dtype": "float32", "max_running": 8, "cache_tokens": 4096, "prefill_budget": 256, **changes})
