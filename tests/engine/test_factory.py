"""From a configured model to its engine and tokenizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference.config import Config, ModelSpec
from inference.engine.base import Engine
from inference.engine.factory import make_engine, make_tokenizer
from inference.errors import ConfigError, ModelUnavailable
from tests.tokenizers import write_model_folder

CONFIG = Config()
SCRIPTED = ModelSpec("s", "scripted", "rate=10,context=100")
UPSTREAM = ModelSpec("u", "openai", "http://127.0.0.1:9/v1#x")


@pytest.mark.parametrize("spec", [SCRIPTED, UPSTREAM])
async def test_engine_is_made_without_being_loaded(spec: ModelSpec) -> None:
    engine = make_engine(spec, "cpu", CONFIG)
    assert isinstance(engine, Engine)
    await engine.close()


@pytest.mark.parametrize("spec", [ModelSpec("s", "scripted", "rate=x"), ModelSpec("u", "openai", "nowhere")])
def test_malformed_target_is_refused(spec: ModelSpec) -> None:
    with pytest.raises(ConfigError):
        make_engine(spec, "cpu", CONFIG)


def test_each_engine_has_its_tokenizer(tmp_path: Path) -> None:
    (write_model_folder(tmp_path) / "config.json").write_text('{"max_position_embeddings": 64}')
    local = ModelSpec("t", "transformers", str(tmp_path))
    assert make_tokenizer(local, CONFIG).context_length == 64
    assert make_tokenizer(local, Config(context_length=32)).context_length == 32
    assert make_tokenizer(SCRIPTED, CONFIG).context_length == 100
    assert make_tokenizer(UPSTREAM, CONFIG).encode("abcd") == [0]


def test_missing_folder_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable):
        make_tokenizer(ModelSpec("t", "transformers", str(tmp_path / "none")), CONFIG)


@pytest.mark.parametrize("spec", [SCRIPTED, UPSTREAM])
def test_engines_without_weights_load_no_torch(spec: ModelSpec) -> None:
    code = (
        "import sys; from inference.config import *; from inference.engine.factory import *; "
        f"spec = ModelSpec({spec.alias!r}, {spec.engine!r}, {spec.target!r}); "
        "make_engine(spec, 'cpu', Config()); make_tokenizer(spec, Config()); "
        "sys.exit(bool({'torch', 'transformers', 'tokenizers', 'django'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    assert subprocess.run([sys.executable, "-c", code], env=env, cwd=root, timeout=60).returncode == 0
