"""The engines behind one interface, for the contract suite."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from inference.config import Config
from inference.engine.base import Engine
from inference.engine.openai_upstream import OpenAIEngine
from inference.engine.scripted import ScriptedEngine, ScriptedOptions
from inference.messages import Job, SamplingParams
from tests.engine.contract_table import ContractTable
from tests.engine.rig import Rig, write_tiny_model
from tests.engine.upstream import Upstream

CONTEXT = 1024
DEVICE = os.environ.get("SLUICE_TEST_DEVICE", "cpu")
"""Where the transformers engine runs; ``scripts/gpu_check.py`` sets it."""
SLOTS = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--contract-table", metavar="FILE", help="write what the contract suite gave into a document")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--contract-table", None):
        config.pluginmanager.register(ContractTable(Path(path)))


class Kit:
    """One kind of engine: how to make it and how to ask it.

    Attributes:
        exact: token ids are the model's own, so answers resume and stop ids work.
        upstream: the server behind an ``openai`` engine.
    """

    def __init__(self, name: str, make: Callable[[], Engine], upstream: Upstream | None = None) -> None:
        self.name = name
        self.exact = upstream is None
        self.upstream = upstream
        self._make = make
        self.rigs: list[Rig] = []

    async def rig(self, *, load: bool = True) -> Rig:
        """A new engine; closed after the test."""
        rig = Rig(self._make())
        self.rigs.append(rig)
        return await rig.load() if load else rig

    def job(self, name: str = "r1", prompt: str = "hello", **params: Any) -> Job:
        """Greedy by default, and never ended by the model itself."""
        params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params}
        ids = list(prompt.encode())
        body = {"prompt": prompt, "max_tokens": params["max_tokens"], "ignore_eos": params["ignore_eos"]}
        text = None if self.exact else json.dumps(body)
        return Job(name, "alias", ids, SamplingParams(**params), prompt_text=text)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["scripted", "openai", "transformers"])
async def kit(request: pytest.FixtureRequest) -> AsyncIterator[Kit]:
    config = Config(
        max_running=SLOTS,
        cache_tokens=SLOTS * CONTEXT,
        context_length=CONTEXT,
        prefill_budget=256,
        dtype="float32",
    )
    async with AsyncExitStack() as stack:
        if request.param == "scripted":
            options = ScriptedOptions(context=CONTEXT, slots=SLOTS)
            kit = Kit("scripted", lambda: ScriptedEngine(options, alias="alias"))
        elif request.param == "openai":
            upstream = await stack.enter_async_context(Upstream(context=CONTEXT))
            target = f"{upstream.url}#words"
            kit = Kit("openai", lambda: OpenAIEngine(target, alias="alias", config=config), upstream)
        else:
            engine = pytest.importorskip("inference.engine.transformers.engine")
            folder = Path(request.getfixturevalue("tiny_folder"))
            kit = Kit(
                "transformers",
                lambda: engine.TransformersEngine(str(folder), alias="alias", device=DEVICE, config=config),
            )
        yield kit
        for rig in kit.rigs:
            await rig.engine.close()
