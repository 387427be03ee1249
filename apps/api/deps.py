"""The one door to the process that serves: its gateway, settings and tokenizers.

Everything else in this package asks here, so that a test can put other parts
behind the door.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from apps.api.errors import ApiError, unknown_model
from inference.config import Config, ModelSpec
from inference.errors import ModelUnavailable, UnknownModel
from inference.text.protocol import Tokenizer
from sluice import runtime

T = TypeVar("T")


def gateway() -> Any:
    """The process's gateway.

    Raises:
        NotServing: it has not started, or can not reach its store.
    """
    return runtime.gateway()


def config() -> Config:
    """The core's settings."""
    return runtime.config()


async def tokenizer(alias: str) -> Tokenizer:
    """The tokenizer of a configured model; loaded in a thread on first use.

    Raises:
        ApiError: 404 no such model, 503 its files are not there.
    """
    try:
        found: Tokenizer = await runtime.tokenizer(alias)
    except UnknownModel:
        raise unknown_model(alias) from None
    except ModelUnavailable:
        raise ApiError(503, "The model is not available.", code="model_unavailable", retry_after=5.0) from None
    return found


async def offload(work: Callable[[], T]) -> T:
    """Run work on text in one of the few threads for it."""
    result: T = await runtime.offload(work)
    return result


def model_spec(alias: str) -> ModelSpec | None:
    """The configured model of that public name."""
    return next((spec for spec in config().model_specs() if spec.alias == alias), None)
