"""``/v1/embeddings`` with a real model, through the whole site."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from apps.api import openapi
from apps.api.embeddings import shortened
from apps.api.errors import ApiError
from inference.embedded import EmbeddedValkey
from tests.apps.api import live
from tests.apps.api.live import Site, chat
from tests.apps.api.test_documents import schema_of
from tests.minilm import minilm_folder
from tests.support import eventually

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

PATH = "/v1/embeddings"
schema = schemathesis.openapi.from_dict(openapi.document())
CAT, KITTEN, MARKET = "A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell by three percent."


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with MiniLM, and a model that generates."""
    models = f"minilm=embed:{minilm_folder()} demo=scripted:rate=0,say=1"
    with EmbeddedValkey() as valkey:
        running = live.start(tmp_path_factory.mktemp("vectors"), valkey, models)
        try:
            yield running
        finally:
            live.stop(running)


def dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def direct(texts: list[str]) -> list[list[float]]:
    """What the model's authors describe, computed with transformers alone, one text after the other."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = minilm_folder()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    out = []
    for text in texts:
        with torch.inference_mode():
            tokens = model(**tokenizer([text], padding=False, return_tensors="pt")).last_hidden_state[0]
        mean = tokens.mean(0)
        out.append([float(x) for x in mean / mean.norm()])
    return out


def test_the_official_client_gets_the_models_vectors(vectors: Site) -> None:
    texts = [CAT, KITTEN, MARKET, "naïve café - 東京", "x"]
    with openai.OpenAI(base_url=f"{vectors.url}/v1", api_key=vectors.key, max_retries=0) as client:
        floats = client.embeddings.create(model="minilm", input=texts, encoding_format="float")
        packed = client.embeddings.create(model="minilm", input=texts, encoding_format="base64")
        plain = client.embeddings.create(model="minilm", input=CAT)  # the client asks for base64 by itself
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="demo", input="x")
    assert refused.value.code == "model_not_supported"
    got = [entry.embedding for entry in floats.data]
    assert [entry.index for entry in floats.data] == list(range(5))
    for mine, theirs in zip(got, direct(texts), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    for entry, mine in zip(packed.data, got, strict=True):
        assert isinstance(entry.embedding, str)
        assert list(struct.unpack("<384f", base64.b64decode(entry.embedding))) == pytest.approx(mine, abs=1e-6)
    assert plain.data[0].embedding == pytest.approx(got[0], abs=1e-6)
    assert dot(got[0], got[0]) == pytest.approx(1, abs=1e-5)
    assert dot(got[0], got[1]) > 0.5 > 0.2 > dot(got[0], got[2])
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == 9


@pytest.mark.filterwarnings("ignore")  # others' libraries warn about themselves
async def test_other_clients_get_them_too(vectors: Site) -> None:
    import litellm
    from langchain_openai import OpenAIEmbeddings

    url, texts = f"{vectors.url}/v1", [CAT, MARKET]
    async with httpx.AsyncClient() as http, openai.AsyncOpenAI(base_url=url, api_key=vectors.key) as client:
        # Without the switch it sends token ids of OpenAI's own vocabulary, which no other model can read.
        chain = OpenAIEmbeddings(
            base_url=url,
            api_key=vectors.key,
            model="minilm",
            check_embedding_ctx_length=False,
            http_async_client=http,
        )  # type: ignore[call-arg,arg-type]
        many = await chain.aembed_documents(texts)
        one = await chain.aembed_query(CAT)
        lite = await litellm.aembedding(
            model="openai/minilm", api_base=url, api_key=vectors.key, input=texts, client=client
        )
    for mine, theirs, other in zip(many, lite.data, direct([CAT, MARKET]), strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
        assert theirs["embedding"] == pytest.approx(other, abs=1e-5)
    assert one == pytest.approx(many[0], abs=1e-5)


@schema.include(path=PATH).parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore")
def test_no_embedding_request_breaks_the_server(vectors: Site, case: Any) -> None:
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "minilm"
    response = case.call(base_url=vectors.url, headers={"Authorization": f"Bearer {vectors.key}"}, timeout=60)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_texts_and_token_ids_are_the_same_question(vectors: Site) -> None:
    async with vectors.client() as client:
        ids = [
            (await client.post("/tokenize", json={"model": "minilm", "prompt": text})).json()["tokens"]
            for text in (CAT, KITTEN)
        ]
        texts = (await client.post(PATH, json={"model": "minilm", "input": [CAT, KITTEN], "user": "u"})).json()
        lists = (await client.post(PATH, json={"model": "minilm", "input": ids})).json()
        one = (await client.post(PATH, json={"model": "minilm", "input": ids[1]})).json()
    jsonschema.Draft202012Validator(schema_of(PATH, "post")).validate(texts)
    for left, right in zip(texts["data"], lists["data"], strict=True):
        assert left["embedding"] == pytest.approx(right["embedding"], abs=1e-6)
    assert one["data"][0]["embedding"] == pytest.approx(lists["data"][1]["embedding"], abs=1e-6)
    assert texts["usage"] == lists["usage"] == {"prompt_tokens": 18, "total_tokens": 18}


async def test_a_batch_of_fifty_keeps_its_order(vectors: Site) -> None:
    texts = [f"Sentence {i} is about {['cats', 'ships', 'bread'][i % 3]}." * (1 + i % 4) for i in range(50)]
    async with vectors.client() as client:
        batch = (await client.post(PATH, json={"model": "minilm", "input": texts})).json()
        alone = [(await client.post(PATH, json={"model": "minilm", "input": texts[i]})).json() for i in (0, 17, 49)]
    assert [entry["index"] for entry in batch["data"]] == list(range(50))
    for number, single in zip((0, 17, 49), alone, strict=True):
        assert batch["data"][number]["embedding"] == pytest.approx(single["data"][0]["embedding"], abs=1e-5)


async def test_dimensions_are_cut_and_normalised(vectors: Site) -> None:
    async with vectors.client() as client:
        whole = (await client.post(PATH, json={"model": "minilm", "input": CAT})).json()["data"][0]["embedding"]
        short = await client.post(PATH, json={"model": "minilm", "input": CAT, "dimensions": 64})
        over = await client.post(PATH, json={"model": "minilm", "input": CAT, "dimensions": 385})
        packed = await client.post(
            PATH, json={"model": "minilm", "input": CAT, "dimensions": 64, "encoding_format": "base64"}
        )
    cut = short.json()["data"][0]["embedding"]
    raw = base64.b64decode(packed.json()["data"][0]["embedding"])
    assert list(struct.unpack("<64f", raw)) == pytest.approx(cut, abs=1e-6)
    assert len(cut) == 64
    assert dot(cut, cut) == pytest.approx(1, abs=1e-5)
    assert cut[0] / cut[1] == pytest.approx(whole[0] / whole[1], rel=1e-4)
    assert (over.status_code, over.json()["error"]["param"]) == (400, "dimensions")
    with pytest.raises(ApiError):
        shortened([1.0], 2)
    assert shortened([0.0, 1.0], 1) == [0.0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "word " * 300}, "input"),
        ({"input": [1] * 257}, "input"),
        ({"input": None}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "timeout": 1e5}, "timeout"),
        ({"input": "x", "stream": True}, "stream"),
        ({}, "input"),
    ],
)
async def test_wrong_inputs_are_refused_by_name(vectors: Site, fields: dict[str, Any], param: str) -> None:
    async with vectors.client() as client:
        reply = await client.post(PATH, json={"model": "minilm", **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    too_long = isinstance(fields.get("input"), (str, list)) and len(fields["input"]) in (257, 1500)
    assert (reply.json()["error"]["code"] == "context_length_exceeded") == too_long


async def test_models_that_embed_do_not_generate(vectors: Site) -> None:
    wrong = {
        "/v1/chat/completions": chat(model="minilm"),
        "/v1/completions": {"model": "minilm", "prompt": "x"},
        "/v1/responses": {"model": "minilm", "input": "x"},
        "/generate": {"model": "minilm", "prompt": "x"},
    }
    async with vectors.client() as client:
        for path, body in wrong.items():
            reply = await client.post(path, json=body)
            assert (path, reply.status_code, reply.json()["error"]["code"]) == (path, 400, "model_not_supported")
        # The first configured model embeds; a request that names none means the first that generates.
        assert (await client.post("/generate", json={"prompt": "x", "max_tokens": 1, "stream": False})).is_success
        models = {m["id"]: m for m in (await client.get("/v1/models")).json()["data"]}
        assert (await client.get("/v1/models/minilm")).json() == models["minilm"]
        assert (await client.post(PATH, json={"model": "none", "input": "x"})).status_code == 404
    assert {alias: model["kind"] for alias, model in models.items()} == {"minilm": "embed", "demo": "generate"}
    assert models["minilm"]["context_length"] == 256


async def test_a_deadline_holds_and_limits_count_tokens(vectors: Site) -> None:
    async with vectors.client() as client, vectors.client(vectors.limited) as limited:
        late = await client.post(PATH, json={"model": "minilm", "input": ["word " * 200] * 500, "timeout": 0.05})
        assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
        replies = [await limited.post(PATH, json={"model": "minilm", "input": ["x"] * 20}) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[0].headers["x-ratelimit-limit-requests"] == "2"


async def inflight(site: Site) -> float:
    """Requests to MiniLM that have not ended."""
    async with site.client(site.admin) as admin:
        lines = (await admin.get("/metrics")).text.splitlines()
    mine = [line for line in lines if line.startswith("sluice_requests_inflight{") and 'model="minilm"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in mine)


@pytest.mark.faults
async def test_a_killed_worker_changes_no_vector(vectors: Site) -> None:
    pool = vectors.processes[1].pid
    texts = [f"{i} is a number, and so is {i + 1}. " * 12 for i in range(200)]

    async def running() -> bool:
        return await inflight(vectors) > 0

    async with vectors.client() as client:
        task = asyncio.create_task(client.post(PATH, json={"model": "minilm", "input": texts}, timeout=120))
        await eventually(running, 60)
        (worker,) = Path(f"/proc/{pool}/task/{pool}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        reply = await task
        assert reply.status_code == 200, reply.text
        data = reply.json()["data"]
        assert len(data) == 200
        for index, expected in zip((0, 99, 199), direct([texts[i] for i in (0, 99, 199)]), strict=True):
            assert data[index]["embedding"] == pytest.approx(expected, abs=1e-5)
    assert Path(f"/proc/{pool}/task/{pool}/children").read_text().split() != [worker]
    assert await inflight(vectors) == 0


async def test_a_client_that_leaves_leaves_nothing_behind(vectors: Site) -> None:
    body = {"model": "minilm", "input": ["word " * 200] * 1000}

    async def running() -> bool:
        return await inflight(vectors) > 0

    async def idle() -> bool:
        return await inflight(vectors) == 0

    async with vectors.client() as client:
        task = asyncio.create_task(client.post(PATH, json=body))
        await eventually(running, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(idle, 20)
        # Slots are free again: the next one is served at once.
        assert (await client.post(PATH, json={"model": "minilm", "input": CAT, "timeout": 20})).status_code == 200
