"""Clients that others wrote, against a live site: they must work without a special case."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import httpx
import openai
import pytest
from httpx_sse import aconnect_sse
from pydantic import BaseModel
from websockets.sync.client import connect

from tests.apps.api.live import Site, chat
from tests.apps.api.test_http import SAY_CALL, TOOLS
from tests.conftest import skip_or_fail
from tests.support import eventually

MESSAGES: Any = [{"role": "user", "content": "hi"}]
# Others' libraries warn about themselves.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(180)]


class Verdict(BaseModel):
    ok: bool


def sync(site: Site, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=0, **options)


def test_openai_sync_plain_and_streamed(site: Site) -> None:
    with sync(site) as client:
        plain = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=8, temperature=0)
        text, finishes, usage = "", [], None
        stream = client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finishes += [choice.finish_reason] if choice.finish_reason else []
        assert text == plain.choices[0].message.content
        assert finishes == ["length"]
        assert usage == plain.usage
        assert [model.id for model in client.models.list()] == ["demo", "slow", "one"]
        assert client.models.retrieve("demo").id == "demo"
        done = client.completions.create(model="demo", prompt=["a", "b"], max_tokens=3, logprobs=2)
        assert len(done.choices) == 2
        assert len(done.choices[0].logprobs.tokens) == 3  # type: ignore[union-attr,arg-type]


async def test_openai_async_raw_streaming_helper_and_tools(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=0) as client:
        raw = await client.chat.completions.with_raw_response.create(model="demo", messages=MESSAGES, max_tokens=2)
        assert raw.headers["x-sluice-request"] == raw.parse().id
        call: Any = [{"role": "user", "content": SAY_CALL}]
        async with client.chat.completions.stream(model="demo", messages=call, tools=TOOLS, max_tokens=200) as stream:  # type: ignore[arg-type]
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        assert final.choices[0].finish_reason == "tool_calls"
        called = final.choices[0].message.tool_calls[0].function  # type: ignore[index]
        assert (called.name, json.loads(called.arguments)) == ("get_weather", {"city": "Paris"})


def test_openai_sync_raw_streamed_response_and_helper(site: Site) -> None:
    fields: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    with sync(site) as client:
        raw = client.chat.completions.with_raw_response.create(**fields)
        assert raw.headers["x-sluice-request"] == raw.parse().id
        with client.chat.completions.with_streaming_response.create(**fields, stream=True) as reply:
            lines = [line for line in reply.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        said: Any = [{"role": "user", "content": "[[say:all of it]]"}]
        with client.chat.completions.stream(model="demo", messages=said, max_tokens=50) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.content == "all of it"
        text = "".join(
            chunk.choices[0].text
            for chunk in client.completions.create(model="demo", prompt="x", max_tokens=4, seed=1, stream=True)
        )
        assert text == client.completions.create(model="demo", prompt="x", max_tokens=4, seed=1).choices[0].text


async def test_openai_async_leaving_a_stream_cancels_it(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="slow", messages=MESSAGES, max_tokens=1000, extra_body={"ignore_eos": True}, stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        async with site.client() as plain:

            async def ended() -> bool:
                return (await plain.get(f"/v1/requests/{chunk.id}")).json().get("state") != "running"

            await eventually(ended)


async def test_openai_waits_out_a_queue_with_pings(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=0) as client:
        holder = await client.chat.completions.create(
            model="one", messages=MESSAGES, max_tokens=40, extra_body={"ignore_eos": True}, stream=True
        )
        await anext(aiter(holder))
        waiter = await client.chat.completions.create(model="one", messages=MESSAGES, max_tokens=2, stream=True)
        finishes = [c.finish_reason async for chunk in waiter for c in chunk.choices if c.finish_reason]
        await holder.close()
    assert finishes == ["length"]


async def test_openai_parses_structured_answers(site: Site) -> None:
    said: Any = [{"role": "user", "content": '[[say:{"ok": true}]]'}]
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=0) as client:
        answer = await client.chat.completions.parse(
            model="demo", messages=said, response_format=Verdict, max_tokens=50
        )
        assert answer.choices[0].message.parsed == Verdict(ok=True)
        response = await client.responses.parse(
            model="demo", input='[[say:{"ok": false}]]', text_format=Verdict, max_output_tokens=50
        )
        assert response.output_parsed == Verdict(ok=False)


def test_openai_errors_have_their_own_types(site: Site) -> None:
    with sync(site) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="none", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            client.chat.completions.create(model="demo", messages=MESSAGES, temperature=3)
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="demo", input="x")
        failing: Any = [{"role": "user", "content": "[[error@2]]"}]
        with pytest.raises(openai.APIError) as broken:
            list(client.chat.completions.create(model="demo", messages=failing, stream=True, max_tokens=50))
        assert broken.value.code == "engine_error"
    with (
        openai.OpenAI(base_url=f"{site.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


async def test_openai_responses_stream_continue_and_forget(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=0) as client:
        text, kinds = "", []
        stream = await client.responses.create(model="demo", input="hi", max_output_tokens=6, stream=True)
        async for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.incomplete"
        first = event.response  # type: ignore[union-attr]
        assert first.output_text == text
        second = await client.responses.create(
            model="demo", input="more", previous_response_id=first.id, max_output_tokens=4, instructions="Be kind."
        )
        assert second.usage.input_tokens > first.usage.input_tokens + 6  # type: ignore[union-attr]
        assert (await client.responses.retrieve(first.id)).output_text == text
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="demo", input="x", previous_response_id=first.id)
        tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
        called = await client.responses.create(model="demo", input=SAY_CALL, tools=tools, max_output_tokens=200)
        call: Any = called.output[0]
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        after = await client.responses.create(
            model="demo", input=[result], previous_response_id=called.id, max_output_tokens=4
        )
        assert after.status == "incomplete"
        async with client.responses.stream(model="demo", input=SAY_CALL, tools=tools, max_output_tokens=200) as helper:
            final = await helper.get_final_response()
        assert final.output[0].type == "function_call"


async def test_a_failing_response_stream_ends_with_failed(site: Site) -> None:
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=0) as client:
        stream = await client.responses.create(model="demo", input="[[error@2]]", max_output_tokens=50, stream=True)
        *_, last = [event async for event in stream]
    assert last.type == "response.failed"
    assert type(last).model_validate(last.model_dump()).response.error.code == "server_error"  # type: ignore[union-attr]


async def test_httpx_sse(site: Site) -> None:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {site.key}"}) as client:
        url = f"{site.url}/v1/chat/completions"
        async with aconnect_sse(client, "POST", url, json=chat(stream=True)) as source:
            seen = [event.data async for event in source.aiter_sse()]
    assert seen[-1] == "[DONE]"
    assert all(json.loads(data)["object"] == "chat.completion.chunk" for data in seen[:-1])


def test_websockets_sync(site: Site) -> None:
    headers = {"Authorization": f"Bearer {site.key}"}
    url = f"ws://{site.host}/ws/v1/stream"
    with connect(url, additional_headers=headers, subprotocols=["sluice.v1"]) as socket:  # type: ignore[list-item]
        socket.send(json.dumps({"type": "generate", "id": "a", "model": "demo", "prompt": "x", "max_tokens": 5}))
        seen = [json.loads(socket.recv(10))]
        while seen[-1]["type"] != "done":
            seen.append(json.loads(socket.recv(10)))
    assert seen[0]["type"] == "accepted"
    assert seen[-1]["usage"]["completion_tokens"] == 5


def test_curl(site: Site) -> None:
    program = shutil.which("curl")
    if program is None:
        skip_or_fail("curl is not installed")
    base = [program, "-sS", "-N", "-H", f"Authorization: Bearer {site.key}", "-H", "Content-Type: application/json"]

    def curl(body: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
        url = f"{site.url}/v1/chat/completions"
        return subprocess.run(
            [*base, *options, "-d", json.dumps(body), url], capture_output=True, text=True, timeout=60
        )

    stream = curl(chat(stream=True))
    assert stream.returncode == 0
    assert stream.stdout.endswith("data: [DONE]\n\n")
    refused = curl(chat(n=0), "-w", "%{http_code}")
    assert refused.stdout.endswith("400")
    assert json.loads(refused.stdout[:-3])["error"]["param"] == "n"
    late = curl(chat(model="slow", max_tokens=1000, ignore_eos=True), "--max-time", "1")
    assert (late.returncode, late.stdout) == (28, "")
    compressed = curl(chat(stream=True), "--compressed", "-D", "-")
    assert "content-encoding" not in compressed.stdout.lower()
    assert "data: [DONE]" in compressed.stdout


async def test_langchain(site: Site) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    model = ChatOpenAI(
        model="demo", base_url=f"{site.url}/v1", api_key=site.key, max_tokens=8, temperature=0, max_retries=0
    )  # type: ignore[call-arg,arg-type]
    plain = await model.ainvoke("hi")
    streamed = "".join([str(chunk.content) async for chunk in model.astream("hi")])
    assert streamed == plain.content
    assert plain.usage_metadata["output_tokens"] == 8  # type: ignore[index]
    loud = ChatOpenAI(model="demo", base_url=f"{site.url}/v1", api_key=site.key, max_tokens=200)  # type: ignore[call-arg,arg-type]
    answer = await loud.bind_tools(TOOLS).ainvoke(SAY_CALL)
    assert answer.tool_calls[0]["args"] == {"city": "Paris"}  # type: ignore[union-attr]
    structured = loud.with_structured_output(Verdict, method="json_schema")
    assert await structured.ainvoke('[[say:{"ok": true}]]') == Verdict(ok=True)
    counted = [chunk async for chunk in model.astream("hi", stream_usage=True)]
    assert sum(c.usage_metadata["output_tokens"] for c in counted if c.usage_metadata) == 8
    legacy = OpenAI(model="demo", base_url=f"{site.url}/v1", api_key=site.key, max_tokens=4, temperature=0)  # type: ignore[call-arg,arg-type]
    assert "".join([piece async for piece in legacy.astream("x")]) == await legacy.ainvoke("x")


async def test_litellm(site: Site) -> None:
    import litellm

    options: Any = {
        "model": "openai/demo",
        "api_base": f"{site.url}/v1",
        "api_key": site.key,
        "messages": MESSAGES,
        "max_tokens": 8,
        "temperature": 0,
        "num_retries": 0,
    }
    plain = await litellm.acompletion(**options)
    stream = await litellm.acompletion(**options, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == plain.choices[0].message.content
    called = await litellm.acompletion(
        **{**options, "messages": [{"role": "user", "content": SAY_CALL}], "tools": TOOLS, "max_tokens": 200}
    )
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments) == {"city": "Paris"}
    with pytest.raises(litellm.NotFoundError):
        await litellm.acompletion(**{**options, "model": "openai/none"})
