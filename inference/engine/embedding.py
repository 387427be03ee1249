"""Texts to vectors: an engine whose answers are not generated but read off a model in one pass.

A job's answer is one output whose ``text`` is the vector, float32 little-endian
in base64, and whose ``ids`` are empty: nothing was
generated. Jobs that wait are computed together, padded to the longest of them.

What the vector is follows the model folder's own description as
sentence-transformers writes it (``modules.json``): pooling by mean, CLS token or
maximum, and normalisation where it is listed. A folder without one gets the mean,
normalised. Prompts that such a description may name are not added to the texts.
"""

from __future__ import annotations

import array
import asyncio
import base64
import json
import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec

from inference.config import Config
from inference.engine.base import Died, EngineOutput, Sink
from inference.errors import EngineDied, ModelUnavailable, Overloaded, TooLarge
from inference.messages import EngineStats, Job, ModelInfo

logger = logging.getLogger("sluice.engine")

BATCH_TOKENS = 16384
"""Tokens of one pass, padding included; a single longer text still goes through alone."""

Pooling = Literal["mean", "cls", "max"]
_POOLING: tuple[tuple[str, Pooling], ...] = (
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
)


class Recipe(msgspec.Struct, frozen=True):
    """How a model's token vectors become the vector of a text.

    Attributes:
        max_length: longest text, tokens; 0 where the folder does not say.
    """

    pooling: Pooling = "mean"
    normalize: bool = True
    max_length: int = 0


def read_recipe(folder: str | Path) -> Recipe:
    """The recipe of a model folder.

    Raises:
        ModelUnavailable: a file is malformed, or asks for something that is not offered.
    """
    path = Path(folder)
    model = _read(path / "config.json") or {}
    settings = _read(path / "sentence_bert_config.json") or {}
    tokenizer = _read(path / "tokenizer_config.json") or {}
    lengths = (
        settings.get("max_seq_length"),
        tokenizer.get("model_max_length"),  # where absent, spelled as a number beyond all reason
        model.get("max_position_embeddings"),
    )
    longest = min((n for n in lengths if isinstance(n, int) and n > 0), default=0)
    modules = _read(path / "modules.json")
    if modules is None:
        return Recipe(max_length=longest)
    pooling: Pooling | None = None
    normalize = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(_read(path / module["path"] / "config.json") or {})
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelUnavailable(f"{path.name}: its module {kind} is not supported")
    return Recipe(pooling or "mean", normalize, longest)


def _pooling(settings: dict[str, Any]) -> Pooling:
    named = settings.get("pooling_mode")
    if named in ("mean", "cls", "max"):
        return named
    chosen = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on is True]
    found = [pooling for name, pooling in _POOLING if name in chosen]
    if len(chosen) != 1 or not found:
        raise ModelUnavailable("the model's pooling is none of mean, cls and max")
    return found[0]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ModelUnavailable(f"the model's {path.name} is not valid JSON: {error}") from error


def pack(vector: Sequence[float]) -> str:
    """A vector as float32 little-endian, in base64."""
    values = array.array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


class EmbeddingEngine:
    """See the module; the contract is :class:`inference.engine.base.Engine`.

    Args:
        folder: a model folder in the layout of Hugging Face, with or without
            sentence-transformers' description.
    """

    def __init__(self, folder: str, *, alias: str, device: str, config: Config) -> None:
        self._folder, self._alias, self._device, self._config = folder, alias, device, config
        self._slots = config.max_running
        self._recipe = Recipe()
        self._longest = self._dimensions = 0
        self._model: Any = None
        self._held: dict[str, Job] = {}
        self._waiting: dict[str, Job] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embed")
        self._sink: Sink | None = None
        self._died: Died | None = None
        self._dead = False
        self._running = self._steps = self._prompt_tokens = 0
        self._step_seconds = self._last_step = 0.0

    # Contract

    async def load(self, sink: Sink, died: Died) -> ModelInfo:
        self._sink, self._died = sink, died
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._load)
        self._task = asyncio.create_task(self._steps_forever(), name=f"embed {self._alias}")
        longest = self._longest
        return ModelInfo(self._alias, "embed", longest, longest, self._slots, kind="embed", dimensions=self._dimensions)

    def submit(self, job: Job, resumed: Sequence[int] = ()) -> None:
        if self._dead or self._task is None:
            raise EngineDied("The engine has stopped.")
        if not 0 < len(job.prompt_ids) <= self._longest:
            raise TooLarge(f"The text has {len(job.prompt_ids)} tokens; 1 to {self._longest} are possible.")
        if self.free_slots() <= 0:
            raise Overloaded("No slot is free.")
        self._held[job.id] = self._waiting[job.id] = job
        self._wake.set()

    def abort(self, request_id: str) -> None:
        self._held.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def free_slots(self) -> int:
        return 0 if self._dead else self._slots - len(self._held)

    def fits(self, job: Job, resumed: int = 0) -> bool:
        return len(job.prompt_ids) <= self._longest and self.free_slots() > 0

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._running,
            waiting=len(self._waiting),
            slots=self._slots,
            steps=self._steps,
            step_seconds=self._step_seconds,
            last_step_seconds=self._last_step,
            prompt_tokens=self._prompt_tokens,
        )

    async def close(self) -> None:
        self._dead = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._held.clear()
        self._waiting.clear()
        await asyncio.to_thread(self._thread.shutdown)
        self._model = None

    # Steps

    async def _steps_forever(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._sink is not None
        assert self._died is not None
        try:
            while True:
                await self._wake.wait()
                # One turn of the loop lets jobs that were claimed together be computed together.
                await asyncio.sleep(0)
                batch = self._take()
                if not batch:
                    self._wake.clear()
                    continue
                begun = time.monotonic()
                self._running = len(batch)
                vectors = await loop.run_in_executor(self._thread, self._compute, [job.prompt_ids for job in batch])
                self._running = 0
                self._steps += 1
                self._last_step = time.monotonic() - begun
                self._step_seconds += self._last_step
                self._prompt_tokens += sum(len(job.prompt_ids) for job in batch)
                outputs = [
                    EngineOutput(job.id, [], text=vector, finish="stop")
                    for job, vector in zip(batch, vectors, strict=True)
                    if self._held.get(job.id) is job
                ]
                for output in outputs:
                    del self._held[output.id]
                if outputs:
                    self._sink(outputs)
        except Exception as error:  # noqa: BLE001 - whatever failed, this engine can not go on
            self._dead = True
            self._died(error)

    def _take(self) -> list[Job]:
        """The jobs of the next pass, in the order they came."""
        batch: list[Job] = []
        widest = 0
        for job in list(self._waiting.values()):
            widest = max(widest, len(job.prompt_ids))
            if batch and widest * (len(batch) + 1) > BATCH_TOKENS:
                break
            batch.append(self._waiting.pop(job.id))
        return batch

    # In the engine's thread

    def _load(self) -> None:
        import torch
        from transformers import AutoModel

        from inference.engine.transformers.loading import (
            check_devices,
            first_line,
            model_dtype,
            quieten,
            set_cpu_threads,
        )

        path = Path(self._folder)
        self._recipe = read_recipe(path)
        check_devices([self._device])
        device = torch.device(self._device)
        quieten()
        if device.type == "cpu":
            set_cpu_threads(self._config)
        try:
            model, report = AutoModel.from_pretrained(
                self._folder,
                dtype=model_dtype(self._config.dtype, device),
                local_files_only=True,
                trust_remote_code=self._config.trust_remote_code,
                output_loading_info=True,
            )
            self._model = model.to(device).eval()
        except Exception as error:  # the library raises anything; all of it means "unusable"
            raise ModelUnavailable(f"{path.name}: {first_line(error)}") from error
        # A pooler is not used here, and many encoders come without one.
        missing = [name for name in report["missing_keys"] if not name.startswith("pooler.")]
        if missing:
            raise ModelUnavailable(f"{path.name}: {len(missing)} weights are missing, {missing[0]} for one")
        self._model.requires_grad_(False)
        wanted, longest = self._config.context_length, self._recipe.max_length or 512
        self._longest = min(wanted, longest) if wanted else longest
        (packed,) = self._compute([[0] * min(8, self._longest)])
        self._dimensions = len(base64.b64decode(packed)) // 4

    def _compute(self, prompts: list[list[int]]) -> list[str]:
        """One pass: the packed vectors of some texts."""
        import torch

        device = self._model.device
        width = max(map(len, prompts))
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
            mask[row, : len(prompt)] = 1
        mask = mask.to(device)
        with torch.inference_mode():
            tokens = self._model(input_ids=ids.to(device), attention_mask=mask).last_hidden_state.float()
            vectors = _pool(tokens, mask.unsqueeze(-1), self._recipe.pooling)
            if self._recipe.normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
        return [pack(vector) for vector in vectors.tolist()]


def _pool(tokens: Any, mask: Any, how: Pooling) -> Any:
    """``(texts, width, size)`` and its mask ``(texts, width, 1)`` to ``(texts, size)``."""
    if how == "cls":
        return tokens[:, 0]
    if how == "max":
        return tokens.masked_fill(mask == 0, float("-inf")).amax(1)
    return (tokens * mask).sum(1) / mask.sum(1).clamp(min=1)
