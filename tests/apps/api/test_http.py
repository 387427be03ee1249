"""Streams and plain answers exactly as clients parse them (OC-01, OC-05, OC-11, ST-07, LC-05)."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import httpx
import pytest

from tests.apps.api import live
from tests.apps.api.live import Site, chat, events
from tests.support import eventually

pytestmark = pytest.mark.timeout(180)

PATHS = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"model": "demo", "prompt": "once", "max_tokens": 8, "temperature": 0},
    "/generate": {"model": "demo", "prompt": "once", "max_tokens": 8, "temperature": 0},
}


def texts(path: str, objects: list[dict[str, Any]]) -> str:
    if path == "/generate":
        return "".join(o["text"] for o in objects)
    choices = [c for o in objects for c in o["choices"]]
    return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in choices)


@pytest.mark.parametrize("path", PATHS)
async def test_oc_01_stream_framing_and_end(site: Site, path: str) -> None:
    async with site.client() as client:
        reply = await client.post(path, json={**PATHS[path], "stream": True})
        plain = await client.post(path, json={**PATHS[path], "stream": False})
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in reply.headers
    payloads = events(reply.text)
    assert payloads.count("[DONE]") == 1
    assert payloads[-1] == "[DONE]"
    objects = [json.loads(p) for p in payloads[:-1]]
    finishes = [o if path == "/generate" else c for o in objects for c in o.get("choices", [o])]
    assert [f["finish_reason"] for f in finishes if f["finish_reason"]] == ["length"]
    assert len({o["id"] for o in objects}) == 1
    whole = plain.json()
    if path == "/generate":
        assert texts(path, objects) == whole["text"]
    else:
        choice = whole["choices"][0]
        assert texts(path, objects) == choice.get("text", choice.get("message", {}).get("content"))


async def test_oc_01_role_comes_first_and_once(site: Site) -> None:
    async with site.client() as client:
        reply = await client.post("/v1/chat/completions", json=chat(stream=True, n=2))
    chunks = [json.loads(p) for p in events(reply.text)[:-1]]
    roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert roles == [0, 1]
    finishes = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(finishes) == [0, 1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_oc_05_usage_chunk_only_when_asked_for(site: Site, path: str) -> None:
    body = {**PATHS[path], "stream": True}
    async with site.client() as client:
        asked = await client.post(path, json={**body, "stream_options": {"include_usage": True}})
        silent = await client.post(path, json=body)
        wrong = await client.post(path, json={**PATHS[path], "stream_options": {"include_usage": True}})
        plain = await client.post(path, json=PATHS[path])
    chunks = [json.loads(p) for p in events(asked.text)[:-1]]
    assert [c["usage"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain.json()["usage"]
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert not any("usage" in json.loads(p) for p in events(silent.text)[:-1])
    assert wrong.status_code == 400


TOKEN_IDS: list[dict[str, Any]] = [
    {"model": "demo", "prompt": [104, 105], "max_tokens": 3},
    {"model": "demo", "prompt": [[104, 105], [104]], "max_tokens": 3, "n": 2},
]
STREAMED: list[tuple[str, dict[str, Any], bool]] = [
    ("/v1/chat/completions", chat(n=2), False),
    ("/v1/completions", {"model": "demo", "prompt": ["once", "twice"], "max_tokens": 3}, False),
    *(("/v1/completions", body, True) for body in TOKEN_IDS),
]


@pytest.mark.parametrize(("path", "body", "counts"), STREAMED, ids=["chat", "texts", "token ids", "lists of token ids"])
async def test_usage_is_streamed_only_when_asked_for(site: Site, path: str, body: dict[str, Any], counts: bool) -> None:
    async def usages(**fields: Any) -> list[Any]:
        reply = await client.post(path, json={**body, **fields, "stream": True})
        return [o["usage"] for p in events(reply.text)[:-1] if "usage" in (o := json.loads(p))]

    async with site.client() as client:
        assert counts or await usages() == []
        assert await usages(stream_options={}) == []
        assert await usages(stream_options={"include_usage": False}) == []
        *before, last = await usages(stream_options={"include_usage": True})
    assert set(before) == {None}
    assert last["total_tokens"] == last["prompt_tokens"] + last["completion_tokens"]


@pytest.mark.parametrize("body", TOKEN_IDS, ids=["one prompt", "several prompts and answers"])
async def test_a_stream_from_token_ids_closes_with_its_usage(site: Site, body: dict[str, Any]) -> None:
    async with site.client() as client:
        plain = await client.post("/v1/completions", json=body)
        reply = await client.post("/v1/completions", json={**body, "stream": True})
    *before, last = [json.loads(payload) for payload in events(reply.text)[:-1]]
    assert last["usage"] == plain.json()["usage"]
    assert last["choices"][0]["finish_reason"] == "length"
    assert not any("usage" in chunk for chunk in before)


async def test_responses_always_tell_their_usage_in_the_last_event(site: Site) -> None:
    body = {"model": "demo", "input": "hi", "max_output_tokens": 3, "stream": True}
    async with site.client() as client:
        reply = await client.post("/v1/responses", json=body)
        asked = await client.post("/v1/responses", json={**body, "stream_options": {"include_usage": True}})
    objects = [json.loads(p) for p in events(reply.text)]
    usages = [o["response"]["usage"] for o in objects if "response" in o]
    assert usages[:-1] == [None] * (len(usages) - 1)
    assert usages[-1]["output_tokens"] == 3
    # There is nothing to ask for: OpenAI's responses have no such option.
    assert (asked.status_code, asked.json()["error"]["param"]) == (400, "stream_options.include_usage")


async def test_oc_08_the_smaller_limit_holds(site: Site) -> None:
    async with site.client() as client:
        for fields in ({"max_tokens": 50, "max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 50}):
            reply = await client.post("/v1/chat/completions", json=chat(**fields))
            assert reply.json()["usage"]["completion_tokens"] == 5
            assert reply.json()["choices"][0]["finish_reason"] == "length"


async def test_lc_07_the_edge_of_the_context(site: Site) -> None:
    async with site.client() as client:
        used = (await client.post("/v1/chat/completions", json=chat(max_tokens=1))).json()["usage"]["prompt_tokens"]
        room = 4096 - used
        fits = await client.post("/v1/chat/completions", json=chat(max_tokens=room))
        over = await client.post("/v1/chat/completions", json=chat(max_tokens=room + 1))
        prompt = await client.post("/v1/chat/completions", json=chat("x" * 5000))
        huge = await client.post("/v1/chat/completions", json=chat("x" * 5_000_000))
    assert fits.status_code == 200
    assert (over.status_code, over.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (prompt.status_code, prompt.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert huge.status_code == 413


async def test_prompt_lists_ids_echo_and_best_of(site: Site) -> None:
    async def ask(**fields: Any) -> dict[str, Any]:
        async with site.client() as client:
            reply = await client.post("/v1/completions", json={"model": "demo", "max_tokens": 4, **fields})
            assert reply.status_code == 200, reply.text
            return reply.json()

    both = await ask(prompt=["ab", "cd"], seed=1)
    assert [c["index"] for c in both["choices"]] == [0, 1]
    assert both["usage"]["prompt_tokens"] == 4
    text, ids = await ask(prompt="ab", seed=1), await ask(prompt=[97, 98], seed=1)
    assert text["choices"] == ids["choices"]
    assert text["choices"][0]["text"] == both["choices"][0]["text"]
    echoed = await ask(prompt="ab", seed=1, echo=True)
    assert echoed["choices"][0]["text"] == "ab" + text["choices"][0]["text"]
    assert (await ask(prompt=[99, 100], echo=True))["choices"][0]["text"].startswith("cd")
    best = await ask(prompt="ab", n=1, best_of=3, seed=1)
    assert len(best["choices"]) == 1
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    "prompt", [[], [[]], ["a", 1], [["a"]], [-1], [10**6], [2**63], "", ["x"] * 33, None, {"a": 1}, 5]
)
async def test_wrong_completion_prompts(site: Site, prompt: Any) -> None:
    async with site.client() as client:
        reply = await client.post("/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 2})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("prompt")


async def test_oc_11_logprobs_align_with_the_text_in_both_modes(site: Site) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 16}
    async with site.client() as client:
        plain = (await client.post("/v1/chat/completions", json=chat(**fields))).json()["choices"][0]
        stream = await client.post("/v1/chat/completions", json=chat(**fields, stream=True))
    chunks = [json.loads(p)["choices"][0] for p in events(stream.text)[:-1]]
    streamed = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert streamed == plain["logprobs"]["content"]
    assert len(streamed) == 16
    raw = b"".join(bytes(entry["bytes"]) for entry in streamed)
    assert raw.decode("utf-8", "ignore") == plain["message"]["content"].rstrip("\ufffd")
    assert all(len(entry["top_logprobs"]) == 3 for entry in streamed)


async def test_oc_10_null_content_and_calls_reach_the_prompt(site: Site) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

    async def ids(messages: list[dict[str, Any]]) -> str:
        async with site.client() as client:
            reply = await client.post("/tokenize", json={"model": "demo", "messages": messages})
            assert reply.status_code == 200, reply.text
            text = await client.post("/detokenize", json={"model": "demo", "tokens": reply.json()["tokens"]})
            return text.json()["prompt"]

    def talk(content: str | None) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
        ]

    rendered = await ids(talk(None))
    assert rendered == await ids(talk(""))
    assert "None" not in rendered
    assert "null" not in rendered
    assert '{"name": "f", "arguments": {"a": 1}}' in rendered
    assert "<tool_response>\nsun\n</tool_response>" in rendered
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert await ids(plain) == await ids([plain[0], {**plain[1], "tool_calls": []}])
    assert await ids([{"role": "user", "content": None}]) == await ids([{"role": "user", "content": ""}])


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
SAY_CALL = '[[say:<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>]]'


async def test_tool_calls_are_found_and_streamed(site: Site) -> None:
    body = chat(SAY_CALL, tools=TOOLS, max_tokens=200)
    async with site.client() as client:
        plain = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
        stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert plain["finish_reason"] == "tool_calls"
    assert plain["message"]["content"] is None
    function = plain["message"]["tool_calls"][0]["function"]
    assert function == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    deltas = [json.loads(p)["choices"][0] for p in events(stream.text)[:-1]]
    pieces = [c for d in deltas for c in d["delta"].get("tool_calls", [])]
    assert pieces[0]["function"]["name"] == "get_weather"
    assert pieces[0]["id"].startswith("call_")
    assert "".join(p["function"]["arguments"] for p in pieces) == '{"city": "Paris"}'
    assert len(pieces) > 2
    assert [d["finish_reason"] for d in deltas if d["finish_reason"]] == ["tool_calls"]


async def test_a_call_that_a_stop_string_cuts_is_not_said_to_be_whole(site: Site) -> None:
    body = chat(SAY_CALL, tools=TOOLS, max_tokens=200, stop='ris"')
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    async with site.client() as client:
        for stop, finish in (('ris"', "stop"), ("</tool_call>", "tool_calls")):
            plain = (await client.post("/v1/chat/completions", json={**body, "stop": stop})).json()["choices"][0]
            stream = await client.post("/v1/chat/completions", json={**body, "stop": stop, "stream": True})
            assert (
                plain["finish_reason"] == json.loads(events(stream.text)[-2])["choices"][0]["finish_reason"] == finish
            )
            arguments = plain["message"]["tool_calls"][0]["function"]["arguments"]
            assert arguments == ('{"city": "Pa' if finish == "stop" else '{"city": "Paris"}')
            asked = {"model": "demo", "input": SAY_CALL, "tools": flat, "temperature": 0, "stop": stop}
            item = (await client.post("/v1/responses", json=asked)).json()["output"][0]
            assert (item["type"], item["arguments"]) == ("function_call", arguments)
            assert item["status"] == ("incomplete" if finish == "stop" else "completed")


HELD = '"}}\n</tool_call> and then some more'


@pytest.mark.parametrize("stop", [None, HELD], ids=["piece by piece", "held back, and then at once"])
async def test_a_response_has_its_items_in_the_order_of_the_answer(site: Site, stop: str | None) -> None:
    """Whole, texts came before all calls; streamed, text behind a call that came with its end broke the answer."""
    call = SAY_CALL.removeprefix("[[say:").removesuffix("]]")
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    asked = {"model": "demo", "input": f"[[say:so {call} and then {call} the end]]", "tools": flat, "stop": stop}
    async with site.client() as client:
        plain = await client.post("/v1/responses", json=asked)
        stream = await client.post("/v1/responses", json={**asked, "stream": True})
    parsed = [json.loads(p) for p in events(stream.text)]
    arguments = '{"city": "Paris"}'
    wanted = ["so", arguments, " and then", arguments, " the end"]
    for output in (plain.json()["output"], parsed[-1]["response"]["output"]):
        assert [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in output] == wanted
        assert {item["status"] for item in output} == {"completed"}
    deltas = [""] * len(wanted)
    for event in parsed:
        if event["type"] in ("response.output_text.delta", "response.function_call_arguments.delta"):
            deltas[event["output_index"]] += event["delta"]
    assert deltas == wanted


async def test_tool_choice_none_offers_no_tools(site: Site) -> None:
    async with site.client() as client:
        reply = (
            await client.post(
                "/v1/chat/completions", json=chat(SAY_CALL, tools=TOOLS, tool_choice="none", max_tokens=200)
            )
        ).json()
    assert "tool_calls" not in reply["choices"][0]["message"]
    assert "<tool_call>" in reply["choices"][0]["message"]["content"]


async def test_oc_02_a_failing_engine_is_an_error_event_and_no_end(site: Site) -> None:
    async with site.client() as client:
        stream = await client.post("/v1/chat/completions", json=chat("[[error@3]]", stream=True, max_tokens=50))
        plain = await client.post("/v1/chat/completions", json=chat("[[error@3]]", max_tokens=50))
    payloads = events(stream.text)
    assert "[DONE]" not in payloads
    assert json.loads(payloads[-1])["error"]["code"] == "engine_error"
    assert not any(c["finish_reason"] for p in payloads[:-1] for c in json.loads(p)["choices"])
    assert plain.status_code == 500
    assert plain.json()["error"]["code"] == "engine_error"


async def test_timeout_is_a_deadline(site: Site) -> None:
    body = chat(model="slow", max_tokens=1000, ignore_eos=True, timeout=0.5)
    async with site.client() as client:
        plain = await client.post("/v1/chat/completions", json=body)
        stream = await client.post("/v1/chat/completions", json={**body, "stream": True})
    assert (plain.status_code, plain.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert plain.headers["x-should-retry"] == "false"
    assert json.loads(events(stream.text)[-1])["error"]["code"] == "deadline_exceeded"


async def test_queue_events_and_pings_while_waiting(site: Site) -> None:
    holder = chat(model="one", max_tokens=200, ignore_eos=True, stream=True)
    waiter = chat(model="one", max_tokens=1, stream=True, stream_options={"include_queue": True})
    async with site.client() as client, client.stream("POST", "/v1/chat/completions", json=holder) as held:
        lines = held.aiter_lines()  # kept: a dropped iterator would close the response
        await anext(lines)
        async with client.stream("POST", "/v1/chat/completions", json=waiter) as waiting:
            seen = []
            async for line in waiting.aiter_lines():
                seen.append(line)
                if line == "event: queue":
                    break
            assert any(line == "event: queue" for line in seen)


async def test_requests_can_be_seen_and_cancelled_by_their_owner_alone(site: Site) -> None:
    body = chat(model="slow", max_tokens=1000, ignore_eos=True, stream=True)
    async with site.client() as client, site.client(site.other) as other:
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            request_id = reply.headers["x-sluice-request"]
            path = f"/v1/requests/{request_id}"
            assert (await client.get(path)).json()["state"] in ("queued", "running")
            assert (await other.get(path)).status_code == 404
            assert (await other.delete(path)).status_code == 404
            assert (await client.delete(path)).json()["cancelled"] is True
            raw = (await reply.aread()).decode()
        assert json.loads(events(raw)[-1])["error"]["code"] == "cancelled"
        assert (await client.delete(path)).status_code in (200, 404)
        assert (await client.post("/v1/requests/gen-none/cancel")).status_code == 404


async def test_lc_05_an_abandoned_plain_call_is_cancelled(site: Site) -> None:
    body = chat(model="one", max_tokens=2000, ignore_eos=True)
    async with site.client() as client, site.client(site.admin) as admin:

        async def running() -> bool:
            metrics = (await admin.get("/metrics")).text
            return 'sluice_requests_inflight{model="one",state="running"} 1.0' in metrics

        task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await eventually(running, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        async def served() -> bool:
            reply = await client.post("/v1/chat/completions", json=chat(model="one", max_tokens=1, timeout=2))
            return reply.status_code == 200

        await eventually(served, 10)


async def test_a_resumable_stream_is_read_on_by_another_connection(site: Site) -> None:
    body = chat(model="slow", max_tokens=40, ignore_eos=True, stream=True, resumable=True)
    async with site.client() as client:
        got, last = "", 0
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            request_id = reply.headers["x-sluice-request"]
            async for line in reply.aiter_lines():
                if line.startswith("id: "):
                    last = int(line[4:])
                elif line.startswith("data: "):
                    got += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                    if last >= 5:
                        break
        path = f"/v1/requests/{request_id}/events"
        async with site.client(site.other) as other:
            assert (await other.get(path)).status_code == 404
        rest = await client.get(path, headers={"Last-Event-ID": str(last)})
        again = await client.get(path)
        for asked, name in (
            ({"headers": {"Last-Event-ID": "x"}}, "Last-Event-ID"),
            ({"params": {"after": -1}}, "after"),
        ):
            wrong = await client.get(path, **asked)
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)
    assert rest.status_code == 200
    more = [json.loads(p) for p in events(rest.text)[:-1]]
    got += texts("/v1/chat/completions", more)
    assert more[-1]["usage"]["completion_tokens"] == 40
    whole = [json.loads(p) for p in events(again.text)[:-1]]
    assert texts("/v1/chat/completions", whole) == got


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "stop": ["no such text"]}),
        ("/v1/completions", {}),
        ("/v1/completions", {"logprobs": 2}),
        ("/generate", {}),
    ],
)
async def test_nothing_is_lost_or_repeated_after_any_event(site: Site, route: str, fields: dict[str, Any]) -> None:
    """Also where text and the reason of the end came together: what a client has after an event is all up to it."""
    prompt = {"messages": [{"role": "user", "content": "go on"}]} if "chat" in route else {"prompt": "go on"}
    body = {"model": "slow", "max_tokens": 5, "ignore_eos": True, "stream": True, "resumable": True, **prompt, **fields}

    def numbered(raw: str) -> list[tuple[int, list[dict[str, Any]]]]:
        """What each event with a number says: its choices, or in the native format what counts of them."""
        out = []
        for block in raw.split("\n\n"):
            if block.startswith("id: "):
                event = json.loads(block.split("data: ", 1)[1])
                said = event.get("choices") or [{name: event[name] for name in ("text", "finish_reason")}]
                out.append((int(block.split("\n")[0][4:]), said))
        return out

    async with site.client() as client:
        reply = await client.post(route, json=body)
        path = f"/v1/requests/{reply.headers['x-sluice-request']}/events"
        whole = numbered(reply.text)
        numbers = [number for number, _ in whole]
        assert numbers == sorted(set(numbers)) and len(numbers) >= 2
        assert [c["finish_reason"] for _, said in whole for c in said if c["finish_reason"]] == ["length"]
        for number in (0, *numbers):
            rest = await client.get(path, params={"after": number})
            assert numbered(rest.text) == [event for event in whole if event[0] > number]
            assert events(rest.text)[-1] == "[DONE]"


async def test_what_is_read_on_in_later_goes_without_echo(site: Site) -> None:
    """The prompt was not shown to those who read the answer again from its start."""
    asked = {"model": "demo", "prompt": "hi", "max_tokens": 2, "echo": True, "resumable": True}
    async with site.client() as client:
        for stream in (False, True):
            reply = await client.post("/v1/completions", json={**asked, "stream": stream})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "echo")


async def test_oc_03_unknown_route_and_wrong_method(site: Site) -> None:
    async with site.client() as client:
        assert (await client.get("/v1/none")).json()["error"]["message"]
        wrong = await client.get("/v1/chat/completions")
        assert wrong.status_code == 405
        assert "POST" in wrong.headers["allow"]


async def test_a_compressed_body_is_refused_as_such(site: Site) -> None:
    raw = json.dumps(chat()).encode()
    async with site.client() as client:
        for coding, content in (("gzip", gzip.compress(raw)), ("br", raw), ("identity, gzip", raw)):
            reply = await client.post("/v1/chat/completions", content=content, headers={"Content-Encoding": coding})
            assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_encoding")
        plain = await client.post("/v1/chat/completions", content=raw, headers={"Content-Encoding": "Identity"})
    assert plain.status_code == 200


async def test_se_06_a_large_body_is_refused_fast(site: Site) -> None:
    async with site.client() as client:
        for size in (3_000_000, 30_000_000):
            reply = await client.post("/v1/chat/completions", content=json.dumps(chat("a" * size)).encode())
            assert reply.status_code in (400, 413)
            assert reply.json()["error"]["code"] in ("body_too_large", "context_length_exceeded")


async def test_a_caller_is_held_to_its_limits_on_every_transport(site: Site) -> None:
    async with site.client(site.limited) as client:
        long = await client.post("/v1/chat/completions", json=chat(max_tokens=50))
        error = long.json()["error"]
        assert (long.status_code, error["code"], error["param"]) == (400, "limit_exceeded", "max_tokens")
        first = await client.post("/v1/chat/completions", json=chat())
        second = await client.post("/generate", json={"prompt": "x", "max_tokens": 2})
        third = await client.post("/v1/chat/completions", json=chat(stream=True))
    assert first.status_code == second.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert third.status_code == 429
    assert int(third.headers["retry-after"]) >= 1
    assert third.json()["error"]["code"] == "rate_limit_exceeded"


SAY = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": SAY}, "max_tokens"),
        ("/v1/chat/completions", {"messages": SAY, "stream": True}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "x"}, "max_tokens"),
        ("/v1/responses", {"input": "x"}, "max_output_tokens"),
        ("/generate", {"prompt": "x"}, "max_tokens"),
    ],
)
async def test_the_most_that_a_key_may_ask_for_is_the_default_and_more_is_refused_by_name(
    site: Site, path: str, body: dict[str, Any], param: str
) -> None:
    key = live.manage(site, "apikey", "create", "brief", "--quiet", "--max-tokens-per-request", "20").strip()
    asked = {"model": "demo", "temperature": 0, "ignore_eos": True, **body}
    async with site.client(key) as client:
        long = await client.post(path, json={**asked, param: 21})
        error = long.json()["error"]
        assert (long.status_code, error["code"], error["param"]) == (400, "limit_exceeded", param)
        whole = await client.post(path, json={**asked, "stream": False})
    usage = whole.json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 20


async def test_lc_08_a_full_queue_refuses_at_once_with_a_time(site: Site) -> None:
    holder = chat(model="one", max_tokens=400, ignore_eos=True, stream=True)
    async with site.client() as client, client.stream("POST", "/v1/chat/completions", json=holder) as held:
        lines = held.aiter_lines()  # kept: a dropped iterator would close the response
        await anext(lines)
        asked = [
            asyncio.create_task(
                client.post("/v1/chat/completions", json=chat(model="one", max_tokens=1, stream=i % 2 == 0, timeout=3))
            )
            for i in range(40)
        ]
        replies = await asyncio.gather(*asked)
    refused = [r for r in replies if r.status_code == 429]
    assert len(refused) >= 15
    assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
    assert all(r.json()["error"]["code"] == "overloaded" for r in refused)
    # The others were admitted, and their own timeout ended them in the queue.
    assert {r.status_code for r in replies} <= {200, 408, 429}


async def test_looking_at_a_stream_does_not_take_it_from_its_reader(site: Site) -> None:
    body = {"model": "slow", "prompt": "x", "max_tokens": 30, "ignore_eos": True, "resumable": True, "stream": True}
    async with site.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
        path = f"/v1/requests/{reply.headers['x-sluice-request']}/events"
        looked = await client.head(path)
        assert (looked.status_code, looked.headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        assert (await client.head("/v1/requests/gen-none/events")).status_code == 404
        async with site.client(site.other) as stranger:
            assert (await stranger.head(path)).status_code == 404
        raw = (await reply.aread()).decode()
    assert events(raw)[-1] == "[DONE]"


async def test_the_end_of_a_server_ends_each_stream_in_the_words_of_its_endpoint(site: Site) -> None:
    """A response used to end with the bare error of the other endpoints, which its clients know no event for."""
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x"},
    }
    last: dict[str, Any] = {}

    async def read(client: httpx.AsyncClient, path: str, begun: asyncio.Event) -> None:
        body = {"model": "slow", "stream": True, "ignore_eos": True, **asked[path]}
        async with client.stream("POST", path, json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    last[path] = json.loads(line[6:])
                    begun.set()

    with live.another_server(site, SLUICE_DRAIN_DEADLINE="0") as (url, server):
        async with live.at(site, url).client() as client, asyncio.TaskGroup() as group:
            for path in asked:
                begun = asyncio.Event()
                group.create_task(read(client, path, begun))
                await asyncio.wait_for(begun.wait(), 30)
            server.terminate()
    assert last["/v1/chat/completions"]["error"]["code"] == "shutting_down"
    assert last["/v1/responses"]["type"] == "response.failed"
    assert last["/v1/responses"]["response"]["error"]["code"] == "server_error"
