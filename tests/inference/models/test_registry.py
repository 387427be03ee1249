"""Targets become folders or hub names; a damaged default model is noticed and named."""

from __future__ import annotations

import pytest

from inference.config import Config, ModelSpec
from inference.errors import ConfigError, ModelUnavailable
from inference.models import registry
from inference.models.registry import check_folder, default_folder, resolve, write_manifest

DEFAULT = ModelSpec("small", "transformers", "default")


@pytest.fixture
def config(tmp_path):
    return Config(cache_dir=str(tmp_path))


@pytest.fixture
def fetched(config):
    """A small folder that looks like a fetched default model."""
    folder = default_folder(config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0123456789")
    write_manifest(folder, source="test==1", source_sha256="00")
    return folder


def test_a_whole_default_model_resolves_to_its_folder(config, fetched):
    assert resolve(DEFAULT, config) == str(fetched)
    assert check_folder(fetched) is None


def test_an_absent_default_model_names_the_command(config):
    with pytest.raises(ModelUnavailable, match=r"'small'.*not been fetched.*manage\.py fetchmodel"):
        resolve(DEFAULT, config)


def damage_short(folder):
    (folder / "model.safetensors").write_bytes(b"012345")


def damage_bytes(folder):
    (folder / "model.safetensors").write_bytes(b"012345678X")


def damage_missing(folder):
    (folder / "config.json").unlink()


def damage_manifest(folder):
    (folder / registry.MANIFEST).write_text("{")


def damage_no_manifest(folder):
    (folder / registry.MANIFEST).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_short, "is corrupt .model.safetensors has 6 bytes instead of 10"),
        (damage_bytes, "is corrupt .model.safetensors has changed"),
        (damage_missing, "is incomplete .config.json is missing"),
        (damage_manifest, "is corrupt .its manifest"),
        (damage_no_manifest, "is incomplete .it has no manifest"),
    ],
)
def test_damage_is_found_and_the_path_is_not_told(config, fetched, damage, message):
    damage(fetched)
    with pytest.raises(ModelUnavailable, match=message) as caught:
        resolve(DEFAULT, config)
    assert str(fetched.parent) not in str(caught.value)


def test_without_weights_their_content_is_not_read(config, fetched):
    damage_bytes(fetched)
    assert resolve(DEFAULT, config, weights=False) == str(fetched)
    damage_short(fetched)
    with pytest.raises(ModelUnavailable):
        resolve(DEFAULT, config, weights=False)


def test_a_folder_of_ones_own(config, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    spec = ModelSpec("mine", "transformers", str(folder))
    with pytest.raises(ModelUnavailable, match=r"config\.json") as caught:
        resolve(spec, config)
    assert str(tmp_path) not in str(caught.value)
    (folder / "config.json").write_text("{}")
    assert resolve(spec, config) == str(folder)


def test_a_folder_that_does_not_exist_is_not_taken_for_a_hub_name(config):
    with pytest.raises(ModelUnavailable, match="does not exist"):
        resolve(ModelSpec("x", "transformers", "/nowhere/at/all"), config)


def test_hub_names_pass_through(config):
    assert resolve(ModelSpec("x", "transformers", "org/Model-1.5"), config) == "org/Model-1.5"


@pytest.mark.parametrize("target", ["a/b/c", "org/../etc", "with blank", "http://x"])
def test_nonsense_targets_are_refused(config, target):
    with pytest.raises(ConfigError, match="neither a folder nor a hub name"):
        resolve(ModelSpec("x", "transformers", target), config)


def test_other_engines_load_no_files(config):
    with pytest.raises(ConfigError, match="loads no files"):
        resolve(ModelSpec("x", "scripted", "rate=50"), config)
