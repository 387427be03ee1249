"""Tokenizers for tests: the small ones in ``tests/data`` and the real default model's."""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path

from inference.models.tokenizer import ModelTokenizer

DATA = Path(__file__).resolve().parent / "data"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_model_folder(folder: Path, vocabulary: str = "bytelevel", template: str | None = CHATML) -> Path:
    """A model folder without weights around one of the small vocabularies."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DATA / f"{vocabulary}.json", folder / "tokenizer.json")
    byte_level = vocabulary == "bytelevel"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>" if byte_level else "<s>",
        "eos_token": "<|im_end|>" if byte_level else "</s>",
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@lru_cache
def small_tokenizer(vocabulary: str) -> ModelTokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return ModelTokenizer(write_model_folder(Path(folder), vocabulary))
