"""Loads a model folder for continuous batching."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from inference.config import Config
from inference.errors import ConfigError, ModelUnavailable


class Loaded(NamedTuple):
    """A model in memory and what the engine must know of it.

    ``tokenizer`` is ``None`` where the folder holds none; only grammars need it.
    """

    model: Any
    tokenizer: Any
    eos_ids: frozenset[int]
    vocab_size: int
    context_length: int
    suggested: dict[str, float]


def load_model(folder: str, device: torch.device, config: Config, *, ranks: int = 1) -> Loaded:
    """Read weights and tokenizer from a folder (or a hub name). Blocks, for minutes with a large model.

    Args:
        ranks: processes that load the model together, each its share of the weights.

    Raises:
        ModelUnavailable: files missing, corrupt or of an unknown kind.
    """
    path = Path(folder)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelUnavailable(f"{path.name}: no config.json in the model folder; fetch the model again")
    quieten()
    common = {"local_files_only": path.is_dir(), "trust_remote_code": config.trust_remote_code}
    try:
        shared = _shares(AutoConfig.from_pretrained(folder, **common), ranks)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=model_dtype(config.dtype, device), attn_implementation="sdpa", **shared, **common
        )
        model = (model if shared else model.to(device)).eval()
    except ModelUnavailable as error:
        raise ModelUnavailable(f"{path.name}: {error}") from error
    except Exception as error:  # the library raises anything; all of it means "unusable"
        raise ModelUnavailable(f"{path.name}: {first_line(error)}") from error
    model.requires_grad_(False)
    text_config = model.config.get_text_config()
    longest = int(getattr(text_config, "max_position_embeddings", 0) or 0)
    wanted = config.context_length
    tokenizer = _load_tokenizer(folder, common)
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(model, tokenizer),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        context_length=min(wanted, longest) if wanted and longest else wanted or longest or 4096,
        suggested=_suggested(model.generation_config),
    )


def _shares(model_config: Any, ranks: int) -> dict[str, Any]:
    """What makes ``from_pretrained`` load only this process's share of the weights.

    Raises:
        ModelUnavailable: the model can not be divided among so many.
    """
    if ranks == 1:
        return {}
    text = model_config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise ModelUnavailable(f"models of the kind {text.model_type} can not be spread over several devices")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if heads % ranks:
        raise ModelUnavailable(f"its {heads} key-value heads can not be divided evenly among {ranks} devices")
    # The library reads WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def quieten() -> None:
    """Leave the library's words to the process's own logging, and only those that matter.

    Its batching logger writes to standard error by itself, and at lower levels
    prints token ids of prompts.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    batching = logging.getLogger("ContinuousBatchingLogger")
    batching.handlers.clear()
    batching.propagate = True
    batching.setLevel(logging.ERROR)


def model_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on an accelerator and float32 on a CPU.

    On a CPU float32 keeps an answer the same alone, in a batch and after a
    fail-over; bfloat16 rounds so coarsely that near-ties depend on the batch.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_devices(names: Sequence[str]) -> None:
    """See that torch finds the devices of this worker (``cpu``, ``cuda:0`` ...).

    Raises:
        ConfigError: it does not.
    """
    wanted = [torch.device(name).index or 0 for name in names if name.startswith("cuda")]
    there = torch.cuda.device_count() if wanted else 0
    if max(wanted, default=-1) < there:
        return
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = ", ".join(f"cuda:{n.strip()}" for n in shown.split(",") if n.strip()) or ", ".join(names)
    reason = f"it finds {there} of them" if torch.version.cuda else "it is built without CUDA"
    raise ConfigError(f"SLUICE_DEVICES (--devices): torch cannot use {named} ({reason}); use auto, or cpu")


def set_cpu_threads(config: Config, ranks: int = 1) -> None:
    """Share the cores between the workers of this host and their processes, unless OMP_NUM_THREADS decides."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // (config.workers_per_device * ranks)))


def greedy_config() -> GenerationConfig:
    """Arg max over what the sampler leaves; every limit is set per request."""
    return GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)


def _load_tokenizer(folder: str, common: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, **common)
    except Exception:  # noqa: BLE001 - optional: a request with a grammar gets an error of its own
        return None


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for owner in (model.generation_config, model.config.get_text_config(), tokenizer):
        value = getattr(owner, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif value:
            ids.update(int(i) for i in value)
    return frozenset(i for i in ids if i >= 0)


def _suggested(generation: Any) -> dict[str, float]:
    """The sampling parameters that ``generation_config.json`` names, where a request could ask for them."""
    found = {name: getattr(generation, name, None) for name in ("temperature", "top_p")}
    bounds = {"temperature": 2.0, "top_p": 1.0}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, (int, float)) and 0 <= value <= bounds[name]
    }


def first_line(error: BaseException) -> str:
    """What an error says first, bounded."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
