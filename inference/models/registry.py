"""From a configured model to what the loaders read: a local folder or a hub name.

Messages raised here name the model's alias and the mend, never a path: they may
travel further than the operator's terminal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from inference.config import DEFAULT_MODEL, Config, ModelSpec
from inference.errors import ConfigError, ModelUnavailable

MANIFEST = "manifest.json"
DEFAULT_TARGET = "default"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WEIGHTS = (".safetensors", ".bin", ".gguf")
_CHUNK = 1 << 20


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a fetched model: its size in bytes and its SHA-256 (hex)."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What ``fetchmodel`` wrote, in ``manifest.json``; written last, so its presence means complete."""

    format: int = 1
    source: str
    source_sha256: str
    files: dict[str, FileEntry]


def default_folder(config: Config) -> Path:
    """Where the default model lies once fetched."""
    return config.cache_path() / "models" / DEFAULT_MODEL


def resolve_default() -> str:
    """The folder of the default model, where this process's settings say.

    Raises:
        ModelUnavailable: it has not been fetched.
    """
    return resolve(ModelSpec(DEFAULT_MODEL, "transformers", DEFAULT_TARGET), Config.from_env())


def check_models(specs: Iterable[ModelSpec], config: Config) -> None:
    """See that the files of every model are there, before anything slow is started.

    Raises:
        ModelUnavailable, ConfigError: as :func:`resolve`.
    """
    for spec in specs:
        if spec.engine in ("transformers", "embed"):
            resolve(spec, config, weights=False)


def resolve(spec: ModelSpec, config: Config, *, weights: bool = True) -> str:
    """The folder (absolute) or hub name that transformers loads for ``spec``.

    A folder is used as it is and never makes transformers ask a hub. The default
    model is checked against its manifest first: about half a second with
    ``weights``; without (a process that needs the tokenizer only) the weights
    are checked by size alone.

    Raises:
        ModelUnavailable: missing, incomplete or corrupt; names the mend.
        ConfigError: the target is neither a folder nor a hub name.
    """
    if spec.engine not in ("transformers", "embed"):
        raise ConfigError(f"model {spec.alias!r}: engine {spec.engine!r} loads no files")
    if spec.target == DEFAULT_TARGET and spec.engine == "transformers":
        folder = default_folder(config)
        problem = check_folder(folder, weights=weights)
        if problem:
            raise ModelUnavailable(f"model {spec.alias!r}: the default model {problem}; run 'manage.py fetchmodel'")
        return str(folder)
    path = Path(spec.target).expanduser()
    if spec.engine == "embed" and not path.is_dir():
        raise ModelUnavailable(f"model {spec.alias!r}: an embed model is a folder, and this one does not exist")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(
                f"model {spec.alias!r}: its folder holds no config.json; "
                "SLUICE_MODELS must name a Hugging Face model folder"
            )
        return str(path.resolve())
    if spec.target.startswith(("/", ".", "~")):
        raise ModelUnavailable(f"model {spec.alias!r}: the folder that SLUICE_MODELS names does not exist")
    if not _HUB_NAME.fullmatch(spec.target):
        raise ConfigError(f"SLUICE_MODELS: the target of {spec.alias!r} is neither a folder nor a hub name")
    return spec.target


def check_folder(folder: Path, *, weights: bool = True) -> str | None:
    """What is wrong with a fetched model, as the end of a sentence; ``None`` where nothing is."""
    if not folder.is_dir():
        return "has not been fetched"
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        return "is incomplete (it has no manifest)"
    except (OSError, msgspec.DecodeError):
        return "is corrupt (its manifest cannot be read)"
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry.size:
                return f"is corrupt ({name} has {size} bytes instead of {entry.size})"
            if (weights or not name.endswith(_WEIGHTS)) and sha256_of(path) != entry.sha256:
                return f"is corrupt ({name} has changed)"
        except FileNotFoundError:
            return f"is incomplete ({name} is missing)"
        except OSError as exc:
            return f"cannot be read ({name}: {exc.strerror})"
    return None


def write_manifest(folder: Path, *, source: str, source_sha256: str) -> None:
    """Write the manifest of all files now in ``folder``."""
    files = {
        path.name: FileEntry(size=path.stat().st_size, sha256=sha256_of(path))
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    manifest = Manifest(source=source, source_sha256=source_sha256, files=files)
    (folder / MANIFEST).write_text(json.dumps(msgspec.to_builtins(manifest), indent=1) + "\n")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
