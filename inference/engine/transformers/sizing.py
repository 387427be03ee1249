"""How large the cache and the steps of the batching loop are."""

from __future__ import annotations

from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from transformers import ContinuousBatchingConfig
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from inference.config import Config
from inference.engine.transformers.loading import Loaded
from inference.engine.transformers.scheduler import SCHEDULER_TYPE

PAGE_SIZE = 32
"""Tokens per cache page: the grain in which prompts share a prefix."""
FLASH_PAGE_SIZE = 256
"""The same with flash attention, whose paged kernels ask for it."""
CPU_CACHE_TOKENS = 32768
"""Most cache that is taken on a CPU unasked, tokens."""
CPU_CACHE_SHARE = 0.2
"""Most of the free memory that the cache takes on a CPU unasked."""
CUDA_CACHE_SHARE = 0.85
"""Share of the device's free memory for the cache, before it is divided among its workers."""


def batching_config(loaded: Loaded, device: torch.device, config: Config, *, ranks: int = 1) -> Any:
    """The library's settings for a model on a device.

    Without ``cache_tokens`` the cache holds every slot at full context length,
    or as much of that as the memory allows (the least of all devices, where
    ``ranks`` processes share the model and each holds its share of the cache).
    """
    on_cuda = device.type == "cuda"
    flash = on_cuda and _has_flash(loaded.model)
    page = FLASH_PAGE_SIZE if flash else PAGE_SIZE
    tokens = config.cache_tokens or config.max_running * loaded.context_length
    per_token = _bytes_per_token(loaded.model.config.get_text_config(), loaded.model.dtype) / ranks
    if not config.cache_tokens:
        memory = _free_cuda_memory(device) if on_cuda else _free_memory()
        share = (CUDA_CACHE_SHARE if on_cuda else CPU_CACHE_SHARE) / config.workers_per_device
        fitting = max(int(memory * share / per_token), 4 * page)
        tokens = min(tokens, fitting) if on_cuda else min(tokens, fitting, CPU_CACHE_TOKENS)
    return ContinuousBatchingConfig(
        page_size=page,
        num_blocks=-(-tokens // page),
        max_batch_tokens=config.prefill_budget + config.max_running,
        max_requests_per_batch=config.max_running,
        max_memory_percent=0.95,
        max_blocks_per_request=-(-loaded.context_length // page) + 1 if flash else 0,
        allow_block_sharing=True,
        use_async_batching=False,  # a step's tokens must be known before the next one is sampled
        use_cuda_graph=None if on_cuda else False,
        default_compile_level=0,
        auto_switch_to_flash=on_cuda,
        scheduler_type=SCHEDULER_TYPE,
        safety_margin=0.0,
    )


def _free_cuda_memory(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


def _has_flash(model: Any) -> bool:
    return bool(
        model._supports_flash_attn
        and (is_flash_attn_3_available(kernels_fallback_ok=True) or is_flash_attn_2_available(kernels_fallback_ok=True))
    )


def _free_memory() -> int:
    return int(psutil.virtual_memory().available)


def _bytes_per_token(text_config: Any, dtype: torch.dtype) -> int:
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    width = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return int(2 * text_config.num_hidden_layers * heads * width * dtype.itemsize)
