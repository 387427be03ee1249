"""What holds on every way of asking alike, and what is streamed is what comes whole, however fields are combined."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest

from tests.apps.api import live
from tests.apps.api.asking import CHAT, COMPLETIONS, RESPONSES, STREAMS, WAYS, Answer, ask, body, read
from tests.apps.api.live import Site, events
from tests.support import eventually

pytestmark = pytest.mark.timeout(180)


def code_of(way: str, code: str) -> str:
    """Of a failure in the engine; the event of a response has one of OpenAI's own codes."""
    return "server_error" if way == f"{RESPONSES} stream" else code


@pytest.mark.parametrize("way", WAYS)
async def test_a_deadline_ends_what_is_being_decoded(site: Site, way: str) -> None:
    late = await ask(site, way, model="slow", max_tokens=1000, ignore_eos=True, timeout=1)
    assert late.error is not None
    assert (late.error["code"], late.finish) == ("deadline_exceeded", [])
    assert late.status == (200 if way in STREAMS and way != "websocket" else 408)
    assert "[DONE]" not in late.raw


async def test_a_deadline_ends_what_waits_in_the_queue(site: Site) -> None:
    holder = body(f"{CHAT} stream", "x", model="one", max_tokens=1000, ignore_eos=True)
    async with site.client() as client, client.stream("POST", CHAT, json=holder) as held:
        lines = held.aiter_lines()  # kept: a dropped iterator would close the response
        await anext(lines)
        late = await asyncio.gather(*[ask(site, way, model="one", max_tokens=2, timeout=0.5) for way in WAYS])
    for way, answer in zip(WAYS, late, strict=True):
        assert answer.error is not None, way
        assert (answer.error["code"], answer.text, answer.finish) == ("deadline_exceeded", "", []), way
        assert answer.status == (200 if way in STREAMS and way != "websocket" else 408), way


@pytest.mark.parametrize("way", WAYS)
async def test_a_failing_engine_is_told_wherever_it_strikes(site: Site, way: str) -> None:
    several: list[dict[str, Any]] = [{}, {"n": 2}] if way.startswith((CHAT, COMPLETIONS)) else [{}]
    for fields, at in itertools.product(several, (0, 1, 5)):
        failed = await ask(site, way, f"[[error@{at}]]", max_tokens=40, **fields)
        assert failed.error is not None, (fields, at)
        assert (failed.error["code"], failed.finish) == (code_of(way, "engine_error"), []), (fields, at)
        assert failed.status == (200 if way in STREAMS and way != "websocket" else 500)


@pytest.mark.parametrize("way", WAYS)
async def test_priorities(site: Site, way: str) -> None:
    for priority in ("low", "normal", None):
        assert (await ask(site, way, max_tokens=2, priority=priority)).tokens == 2
    high = await ask(site, way, max_tokens=2, priority="high")
    assert (high.status, (high.error or {})["code"], (high.error or {})["param"]) == (
        403, "priority_not_allowed", "priority",
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
async def test_answers_that_end_before_they_have_begun(site: Site, way: str) -> None:
    for text, fields in (
        ("", {}),
        ("one two", {"stop": "o"}),
        ("世界", {"stop": "世"}),
        ("世界", {"stop": ["界", "世界"]}),
        ("abc", {"stop": "a", "max_tokens": 1}),
        ("abc", {"stop_token_ids": [ord("a")]}),
    ):
        answer = await ask(site, way, f"[[say:{text}]]", **{"max_tokens": 40, **fields})
        assert (answer.text, answer.finish) == ("", ["stop"]), (text, fields)
        assert answer.tokens >= 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("part", ["", "-1"], ids=["all", "one"])
async def test_one_of_several_answers_that_is_cancelled_takes_the_others_with_it(
    site: Site, path: str, part: str
) -> None:
    asked = body(f"{path} stream", "x", model="slow", n=2, max_tokens=1000, ignore_eos=True)
    before = await live.ended(site, outcome="cancelled", reason="user")
    failed = await live.ended(site, outcome="failed")
    async with site.client() as client:
        async with client.stream("POST", path, json=asked) as reply:
            name = reply.headers["x-sluice-request"]
            assert (await client.post(f"/v1/requests/{name}{part}/cancel")).json()["cancelled"] is True
            raw = (await reply.aread()).decode()
        assert json.loads(events(raw)[-1])["error"]["code"] == "cancelled"
        assert '"finish_reason":"' not in raw

    async def both_ended() -> bool:
        return await live.ended(site, outcome="cancelled", reason="user") == before + 2

    await eventually(both_ended, 10, what="both are counted as cancelled")
    assert await live.ended(site, outcome="failed") == failed, "the engine did nothing wrong"


# --- streamed and whole -------------------------------------------------------------------

TEXTS = ["hi", "[[say:one two three]]", "[[say:a👨\u200d👩\u200d👧b 世界]]", "[[say:]]", "[[say:x]]"]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'


def put_together(answer: Answer) -> tuple[list[dict[str, Any]], Any]:
    """The choices and the usage of a stream of chunks, as a whole answer has them."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events(answer.raw)[:-1]:
        chunk = json.loads(event)
        usage = chunk["usage"] or usage
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "calls": [], "logprobs": [], "finish": []})
            delta = piece.get("delta", piece)
            choice["text"] += delta.get("content", delta.get("text")) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    choice["calls"].append({"name": call["function"]["name"], "arguments": ""})
                choice["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            choice["logprobs"] += entries(piece["logprobs"])
            choice["finish"] += [piece["finish_reason"]] if piece["finish_reason"] else []
    return [choices[index] for index in sorted(choices)], usage


def taken_apart(answer: Answer) -> tuple[list[dict[str, Any]], Any]:
    """The same of a whole answer."""
    whole = json.loads(answer.raw)
    out = []
    for choice in whole["choices"]:
        said = choice.get("message", choice)
        called = [call["function"] for call in said.get("tool_calls", ())]
        text = said.get("content", said.get("text")) or ""
        out.append(
            {
                "text": text,
                "calls": called,
                "logprobs": entries(choice["logprobs"]),
                "finish": [choice["finish_reason"]],
            }
        )
    return out, whole["usage"]


def entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(
        zip(*[logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")], strict=True)
    )


async def both(client: httpx.AsyncClient, path: str, text: str, fields: dict[str, Any]) -> list[Answer]:
    """The whole and the streamed answer; one client for all, as a new one costs more than an answer."""
    ways = [f"{path} {mode}" for mode in ("json", "stream")]
    return [read(way, await client.post(path, json=body(way, text, **fields))) for way in ways]


async def agree(client: httpx.AsyncClient, path: str, text: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask both ways; the choices, which must be the same."""
    whole, stream = await both(client, path, text, fields)
    assert (whole.status, stream.status) == (200, 200), (fields, whole.error, stream.error)
    choices, usage = put_together(stream)
    assert (choices, usage) == taken_apart(whole), (text, fields)
    assert stream.raw.count('"choices":[]') == 1
    return choices


@pytest.mark.parametrize("text", TEXTS)
async def test_chat_with_all_at_once(site: Site, text: str) -> None:
    several = [{"n": 1}, {"n": 3, "seed": 5, "temperature": 1}]
    stops: list[Any] = [None, ["two"], ["👩"], ["世"], ["o"], ["x", "a"]]
    shown: list[dict[str, Any]] = [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}]
    async with site.client() as client:
        for many, stop, logprobs, most in itertools.product(several, stops, shown, (1, 40)):
            fields = {**many, **logprobs, "stop": stop, "max_tokens": most}
            for choice in await agree(client, CHAT, text, fields):
                assert not any(each in choice["text"] for each in stop or ()), fields
                if logprobs:
                    tokens = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"])
                    assert tokens.startswith(choice["text"].encode()), fields


PROMPTS: list[Any] = [
    "hi", TEXTS[1], ["[[say:ab]]", "[[say:one 世界 two]]"], [104, 105], [[104, 105], [230, 151, 165]], TEXTS[3],
]  # fmt: skip


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_completions_with_all_at_once(site: Site, prompt: Any) -> None:
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    shown: list[dict[str, Any]] = [{}, {"logprobs": 0}, {"logprobs": 3}, {"echo": True}, {"best_of": 2, "n": 2}]
    async with site.client() as client:
        for n, stop, most, more in itertools.product((1, 2), (None, "two", ["o", "世"]), (1, 30), shown):
            fields = {"n": n, "stop": stop, "max_tokens": most, "seed": 3, "temperature": 1, **more}
            choices = await agree(client, COMPLETIONS, "", {"prompt": prompt, **fields})
            assert len(choices) == len(prompts) * fields["n"]
            if "echo" in more and isinstance(prompts[0], str):
                assert all(c["text"].startswith(prompts[at // n]) for at, c in enumerate(choices))


CALLS = [
    CALL, f"hello {CALL}", f"{CALL}\n{CALL}", f"{CALL} bye", CALL[:-12], f"{CALL[:-12]} bye", CALL[:-12] + CALL,
    "<tool", "<tool_call>", "", CALL.replace('"f"', '"g"'), "x <tool_call>{", CALL[:40],
]  # fmt: skip


@pytest.mark.parametrize("text", CALLS)
async def test_calls_with_all_at_once(site: Site, text: str) -> None:
    combined: list[dict[str, Any]] = [
        {}, {"stop": "x"}, {"stop": "</tool_call>"}, {"stop": "<tool_call>"}, {"stop": '"a"'}, {"max_tokens": 1},
        {"max_tokens": 11}, {"max_tokens": 30}, {"max_tokens": 52}, {"parallel_tool_calls": False},
        {"tool_choice": "none"}, {"n": 2}, {"logprobs": True, "top_logprobs": 1}, {"logprobs": True, "max_tokens": 1},
        {"logprobs": True, "n": 2, "stop": "x"},
    ]  # fmt: skip
    async with site.client() as client:
        for fields in combined:
            asked = {"tools": [{"type": "function", "function": TOOL}], **fields}
            choices = await agree(client, CHAT, f"[[say:{text}]]", asked)
            for choice in choices:
                if choice["finish"] == ["tool_calls"]:
                    assert all(json.loads(call["arguments"]) == {"a": "x"} for call in choice["calls"])
                    assert choice["calls"]
            if fields.keys() & {"n", "logprobs"}:
                continue
            asked["tools"] = [{"type": "function", **TOOL}]
            response, stream = await both(client, RESPONSES, f"[[say:{text}]]", asked)
            items = json.loads(response.raw)["output"]
            assert without_ids(items) == without_ids(json.loads(events(stream.raw)[-1])["response"]["output"]), fields
            assert (response.text, response.finish) == (stream.text, stream.finish), fields
            called = [{"name": i["name"], "arguments": i["arguments"]} for i in items if i["type"] == "function_call"]
            assert (called, response.text) == (choices[0]["calls"], choices[0]["text"]), fields


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]
