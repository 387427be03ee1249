"""The engine in front of other people's servers, running the default model.

They have dependencies of their own (``pip install 'transformers[serving]' 'llama-cpp-python[server]'``,
the latter compiles for minutes), so they may live in an environment of their own: ``SLUICE_UPSTREAM_PYTHON``
names its interpreter. ``SLUICE_UPSTREAM_GGUF`` names the file that llama.cpp reads. What is not
there is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from inference.config import Config
from inference.engine.openai_upstream import OpenAIEngine
from inference.messages import Job, SamplingParams
from tests.engine.rig import Answer, Rig
from tests.support import eventually_sync, find_free_port

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]

PYTHON = os.environ.get("SLUICE_UPSTREAM_PYTHON", sys.executable)
START_SECONDS = 240


class Server(NamedTuple):
    kind: str
    url: str
    name: str


def has_modules(*names: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {names!r})))"
    return subprocess.run([PYTHON, "-c", code], timeout=60).returncode == 0


def command(kind: str, port: int, folder: str) -> tuple[list[str], str]:
    """How a server is started, and the name that it gives the model; skips what is not installed."""
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if kind == "transformers":
        if not has_modules("fastapi", "uvicorn"):
            pytest.skip("transformers[serving] is not installed")
        return [PYTHON, "-m", "transformers.cli.transformers", "serve", folder, *address], folder
    gguf = os.environ.get("SLUICE_UPSTREAM_GGUF", "")
    if not has_modules("llama_cpp") or not gguf:
        pytest.skip("llama-cpp-python[server] is not installed, or SLUICE_UPSTREAM_GGUF is not set")
    # It serves one request at a time, and by default breaks off that one when another comes.
    options = ["--model", gguf, "--model_alias", "small", "--interrupt_requests", "false"]
    return [PYTHON, "-m", "llama_cpp.server", *options, *address], "small"


@pytest.fixture(scope="module", params=["transformers", "llama"])
def server(
    request: pytest.FixtureRequest, model_folder: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    port = find_free_port()
    argv, name = command(request.param, port, model_folder)
    output = tmp_path_factory.mktemp("upstream") / "output.txt"
    with open(output, "wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_until_up(process, port, output)
        yield Server(request.param, f"http://127.0.0.1:{port}/v1", name)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_up(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    def up_or_ended() -> bool:
        if process.poll() is not None:
            return True
        try:
            return httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    with contextlib.suppress(AssertionError):
        eventually_sync(up_or_ended, START_SECONDS, every=0.2)
        if process.poll() is None:
            return
    pytest.fail(f"the upstream server did not start:\n{output.read_text(errors='replace')[-2000:]}")


@pytest.fixture
async def rig(server: Server) -> AsyncIterator[Rig]:
    config = Config(stall_timeout=120)
    rig = await Rig(OpenAIEngine(f"{server.url}#{server.name}", alias="alias", config=config)).load()
    yield rig
    await rig.engine.close()


def chat(name: str, text: str, max_tokens: int = 12, **body: Any) -> Job:
    messages = [{"role": "user", "content": text}]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Job(name, "alias", [0] * 8, params, prompt_text=json.dumps({"messages": messages, **body}))


def text_of(answer: Answer) -> str:
    return "".join(output.text or "" for output in answer.outputs)


async def test_chat_streams_and_stops_at_the_limit(rig: Rig) -> None:
    answer = await rig.run(chat("r1", "Tell me a story about the sea.", 12), limit=120)
    assert answer.finish == "length", answer.error
    assert len(answer.outputs) > 3
    assert len(text_of(answer)) > 12
    # Where a server sends text for several tokens at once its usage makes the count right.
    assert 11 <= len(answer.ids) <= 13


async def test_same_greedy_question_gets_the_same_answer(rig: Rig, server: Server) -> None:
    first = await rig.run(chat("r1", "What is the capital of France?"), limit=120)
    second = await rig.run(chat("r2", "What is the capital of France?"), limit=120)
    assert text_of(first) == text_of(second) != ""
    if server.kind == "transformers":  # the four-bit weights that llama.cpp reads need not know it
        assert "Paris" in text_of(first)


async def test_answer_ends_by_itself(rig: Rig) -> None:
    answer = await rig.run(chat("r1", "Say only: yes", 200), limit=200)
    assert answer.finish == "stop", answer.error


async def test_several_run_side_by_side(rig: Rig) -> None:
    answers = [rig.submit(chat(f"r{n}", f"Count to {n + 3}.", 10)) for n in range(3)]
    for answer in answers:
        await answer.finished(200)
        assert answer.finish in ("stop", "length"), answer.error


async def test_abort_in_mid_answer_leaves_the_server_usable(rig: Rig) -> None:
    answer = rig.submit(chat("gone", "Tell me a very long story.", 300))
    await answer.tokens(3, 120)
    rig.engine.abort("gone")
    seen = len(answer.outputs)
    after = await rig.run(chat("next", "What is the capital of France?"), limit=200)
    assert after.finish in ("stop", "length"), after.error
    assert len(answer.outputs) == seen


async def test_refused_body_is_an_error_of_that_request(rig: Rig) -> None:
    job = Job("bad", "alias", [0], SamplingParams(5), prompt_text='{"messages": "none"}')
    answer = await rig.run(job, limit=120)
    assert answer.finish == "error"
    assert answer.error is not None
    assert answer.error.startswith("The upstream server")
    await asyncio.sleep(0)
    assert rig.engine.stats().running == 0
