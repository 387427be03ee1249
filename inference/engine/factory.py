"""From a configured model to its engine and its tokenizer; imports only what the model needs."""

from __future__ import annotations

from pathlib import Path

from inference.config import Config, ModelSpec
from inference.engine.base import Engine
from inference.errors import ModelUnavailable
from inference.text.protocol import Tokenizer

_TOKENIZER_FILES = ("*.json", "*.jinja", "additional_chat_templates/*")


def make_engine(spec: ModelSpec, device: str, config: Config) -> Engine:
    """The engine of ``spec``, not loaded yet.

    Args:
        device: ``cpu``, ``cuda``, ``cuda:0`` ...; engines without weights ignore it.

    Raises:
        ConfigError: the target's options are malformed.
        ModelUnavailable: model files are missing or corrupt.
    """
    if spec.engine == "scripted":
        from inference.engine import scripted

        return scripted.make(spec.target, alias=spec.alias, max_running=config.max_running)
    if spec.engine == "openai":
        from inference.engine.openai_upstream import OpenAIEngine

        return OpenAIEngine(spec.target, alias=spec.alias, config=config)
    from inference.models.registry import resolve

    if spec.engine == "embed":
        from inference.engine.embedding import EmbeddingEngine

        return EmbeddingEngine(resolve(spec, config), alias=spec.alias, device=device, config=config)
    from inference.engine.transformers.engine import TransformersEngine

    engine: Engine = TransformersEngine(resolve(spec, config), alias=spec.alias, device=device, config=config)
    return engine


def make_tokenizer(spec: ModelSpec, config: Config) -> Tokenizer:
    """The tokenizer of ``spec``, for validation, prompts and text; takes a fraction of a second.

    For an ``openai`` model it only estimates: see
    :class:`inference.engine.openai_tokenizer.EstimatingTokenizer`.

    Raises:
        ConfigError: the target's options are malformed.
        ModelUnavailable: model files are missing or corrupt.
    """
    if spec.engine == "scripted":
        from inference.engine import scripted

        return scripted.tokenizer_for(spec.target)
    if spec.engine == "openai":
        from inference.engine.openai_tokenizer import EstimatingTokenizer

        return EstimatingTokenizer(context_length=config.context_length)
    from inference.models.registry import resolve
    from inference.models.tokenizer import ModelTokenizer

    target = resolve(spec, config, weights=False)
    if spec.engine == "embed":
        from inference.engine.embedding import read_recipe

        longest = [n for n in (config.context_length, read_recipe(target).max_length) if n]
        return ModelTokenizer(target, context_length=min(longest, default=0))
    folder = target if Path(target).is_dir() else _from_hub(spec.alias, target)
    return ModelTokenizer(folder, context_length=config.context_length)


def _from_hub(alias: str, name: str) -> str:
    """The folder of a hub model's tokenizer files, downloaded where they are not yet."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder: str = snapshot_download(name, allow_patterns=list(_TOKENIZER_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelUnavailable(
            f"model {alias!r}: the tokenizer of {name} can not be fetched; "
            "download the model and name its folder in SLUICE_MODELS"
        ) from error
    return folder
