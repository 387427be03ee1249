"""The cases of clients' compatibility and of streamed text, on every endpoint and mode that they name."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
from typing import Any

import msgspec
import pytest
import redis

from apps.api import prompts
from apps.api.schema.generation import ChatBody
from apps.api.tools import resolve
from inference.keys import Keys
from inference.messages import decode_worker_beat
from inference.models.tokenizer import ModelTokenizer
from tests.apps.api import live
from tests.apps.api.asking import CHAT, COMPLETIONS, GENERATE, PATHS, RESPONSES, STREAMS, WAYS, Answer, ask, body
from tests.apps.api.live import Site, events
from tests.support import eventually

pytestmark = pytest.mark.timeout(180)

FAMILY = "👨‍👩‍👧‍👦 🇫🇷🇯🇵 e\u0301 你好世界 안녕하세요 नमस्ते दुनिया 😀😃"


def say(text: str) -> str:
    return f"[[say:{text}]]"


def strict(raw: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(raw, parse_constant=refuse)


# --- clients' compatibility --------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_oc_01_the_extremes_of_sampling_are_legal(site: Site, way: str) -> None:
    legal: list[dict[str, Any]] = [
        {"top_p": 0}, {"top_p": 1e-9}, {"top_p": 1}, {"top_p": 1.0}, {"temperature": 0}, {"temperature": 0.0},
        {"temperature": 2}, {"temperature": 1e-9}, {"top_p": None, "temperature": None}, {"top_k": 0}, {"top_k": -1},
        {"min_p": 0}, {"min_p": 1}, {"seed": 0}, {"seed": -1}, {"seed": 2**63 - 1}, {"presence_penalty": -2},
        {"frequency_penalty": 2}, {"logit_bias": {}}, {"logit_bias": {"5": -100}}, {"stop": []}, {"stop": None},
        {"repetition_penalty": 1},
    ]  # fmt: skip
    answers = await asyncio.gather(*[ask(site, way, max_tokens=3, **fields) for fields in legal])
    assert [(a.status, a.finish, a.tokens) for a in answers] == [(200, ["length"], 3)] * len(legal)


@pytest.mark.parametrize("path", PATHS)
async def test_oc_01_the_end_is_said_once_and_then_the_response_ends(site: Site, path: str) -> None:
    answer = await ask(site, f"{path} stream", max_tokens=4)
    payloads = events(answer.raw)
    assert "\r" not in answer.raw
    assert answer.raw.endswith("\n\n")
    if path == RESPONSES:  # whose end is an event of its own, as OpenAI's is
        assert json.loads(payloads[-1])["type"] == "response.incomplete"
        assert [json.loads(p)["sequence_number"] for p in payloads] == list(range(len(payloads)))
        return
    assert payloads.count("[DONE]") == 1
    assert payloads[-1] == "[DONE]"
    assert answer.finish == ["length"]


@pytest.mark.parametrize("way", STREAMS)
async def test_oc_02_a_failure_in_the_middle_is_an_error_and_never_an_end(site: Site, way: str) -> None:
    before = await live.ended(site, outcome="failed", reason="engine_error")
    healthy = [ask(site, way, say("all is well with this one"), max_tokens=40) for _ in range(3)]
    failed, *others = await asyncio.gather(ask(site, way, "[[error@5]]", max_tokens=40), *healthy)
    assert failed.error is not None
    # The event of a response has one of OpenAI's own codes.
    assert failed.error["code"] == ("server_error" if way.startswith(RESPONSES) else "engine_error")
    assert failed.finish == []
    assert failed.text  # what came before is not taken back
    assert "[DONE]" not in failed.raw
    assert all(o.text == "all is well with this one" and o.finish == ["stop"] for o in others)
    named = re.search(r"gen-[0-9a-f]{24}", failed.raw) if way == "websocket" else None
    request_id = named[0] if named else failed.headers["x-sluice-request"]

    def logged() -> bool:
        return any("ERROR" in line and request_id in line for line in site.log.read_text().splitlines())

    await eventually(logged, 10, what="an ERROR line with the request's id")

    async def counted() -> bool:
        return await live.ended(site, outcome="failed", reason="engine_error") == before + 1

    await eventually(counted, 10, what="one failure more in the metrics")


WRONG: list[dict[str, Any]] = [
    {"temperature": -1}, {"temperature": 2.01}, {"temperature": "hot"}, {"temperature": True}, {"temperature": []},
    {"top_p": 1.1}, {"top_p": -1e-9}, {"top_p": {}}, {"model": "no-such-model"}, {"model": 5}, {"model": ""},
    {"model": None}, {"seed": 1.5}, {"seed": "x"}, {"seed": 2**63}, {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1}, {"logit_bias": {"abc": 1}}, {"logit_bias": {"5": 101}}, {"logit_bias": {"-1": 1}},
    {"logit_bias": {"999999": 1}}, {"logit_bias": [1]}, {"stop": ""}, {"stop": [""]}, {"stop": 5}, {"stop": [None]},
    {"stop": ["x"] * 17}, {"stop": "x" * 257}, {"stop_token_ids": [-1]}, {"stop_token_ids": [10**6]}, {"top_k": -2},
    {"top_k": 1.5}, {"min_p": 2}, {"repetition_penalty": 0}, {"min_tokens": 100}, {"priority": "urgent"},
    {"timeout": 0}, {"timeout": -1}, {"timeout": "soon"}, {"timeout": 1e9}, {"stream": "maybe"}, {"stream": 1},
    {"ignore_eos": "no"}, {"resumable": 1}, {"user": 5}, {"foo_unknown": 1}, {"max_new_tokens": 5},
    {"response_format": {"type": "bogus"}}, {"response_format": "json"},
]  # fmt: skip


@pytest.mark.parametrize("path", [*PATHS, "websocket"])
async def test_oc_03_what_is_wrong_is_refused_alike_in_both_modes(site: Site, path: str) -> None:
    async def one(fields: dict[str, Any]) -> None:
        if path in (GENERATE, "websocket") and fields == {"model": None}:
            return  # the first model, there
        if path == "websocket":
            answers = [await ask(site, path, max_tokens=4, **fields)]
        else:
            answers = [await ask(site, f"{path} {mode}", max_tokens=4, **fields) for mode in ("stream", "json")]
        for answer in answers:
            expected = 404 if fields == {"model": "no-such-model"} else 400
            assert answer.status == expected, (path, fields, answer.raw[:200])
            assert answer.error is not None
            assert set(answer.error) == {"message", "type", "param", "code"}
            name = next(iter(fields))
            assert (answer.error["param"] or "").startswith(name), (fields, answer.error)
        assert answers[0].error == answers[-1].error

    for fields in WRONG:
        await one(fields)


@pytest.mark.parametrize("path", [*PATHS, "/v1/embeddings", "/tokenize", "/detokenize"])
async def test_oc_03_bodies_that_are_no_object_and_texts_that_are_no_text(site: Site, path: str) -> None:
    bodies = [
        b"", b" ", b"{", b"[1, 2]", b"null", b"5", b'"x"', b"true", b"\xff\xfe{\x00}\x00", b"\x00", b"NaN",
        b'{"model": "demo", "prompt": "\xff"}', b'{"model": "demo", "temperature": NaN}',
        b'{"model": "demo", "temperature": Infinity}', b'{"model": "demo", "temperature": 1e999}',
        b'{"model": "demo",}', b"{'model': 'demo'}", b'{"a":' * 5000, b"model=demo&prompt=x",
    ]  # fmt: skip
    async with site.client() as client:
        for raw in bodies:
            reply = await client.post(path, content=raw)
            assert reply.status_code == 400, (path, raw[:50], reply.text)
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("way", [w for w in WAYS if w != "websocket"])
async def test_oc_03_a_prompt_beyond_the_context(site: Site, way: str) -> None:
    answer = await ask(site, way, "x" * 6000, max_tokens=4)
    assert (answer.status, answer.error and answer.error["code"]) == (400, "context_length_exceeded")


async def test_oc_05_usage_adds_up_and_is_what_the_tokeniser_counts(site: Site) -> None:
    text = "Grüße 🙂 世界"
    async with site.client() as client:
        plain = (await client.post("/tokenize", json={"model": "demo", "prompt": text})).json()["count"]
        talk = {"model": "demo", "messages": [{"role": "user", "content": text}]}
        rendered = (await client.post("/tokenize", json=talk)).json()["count"]
    for way in WAYS:
        answer = await ask(site, way, text, max_tokens=7)
        assert answer.usage is not None
        assert answer.tokens == 7
        assert answer.usage["total_tokens"] == answer.prompt_tokens + 7
        assert answer.prompt_tokens == (rendered if way.startswith((CHAT, RESPONSES)) else plain), way


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}, "x", [1], {"a": 1}])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_oc_05_stream_options_without_a_stream(site: Site, path: str, options: Any) -> None:
    for stream in (False, None):
        answer = await ask(site, f"{path} json", max_tokens=2, stream_options=options, stream=stream)
        assert answer.status == 400
        assert (answer.error or {})["param"].startswith("stream_options")
    assert (await ask(site, f"{path} json", max_tokens=2, stream_options=None)).status == 200


async def test_oc_05_several_answers_have_one_usage(site: Site) -> None:
    fields = {"n": 3, "max_tokens": 5, "temperature": 1, "seed": 1}
    for path in (CHAT, COMPLETIONS):
        whole, stream = await ask(site, f"{path} json", **fields), await ask(site, f"{path} stream", **fields)
        assert whole.usage == stream.usage
        assert whole.tokens == 15
        assert stream.finish == ["length"] * 3
        assert stream.raw.count('"choices":[]') == 1


ABSENT = object()
MAX_TOKENS: list[tuple[Any, int]] = [
    (ABSENT, 200), (None, 200), (0, 400), (-1, 400), (1, 200), (1.5, 400), (1.0, 400), ("10", 400), (10**12, 400),
    (2**63, 400), (True, 400), ([], 400), ({}, 400), ("x", 400), (-(10**30), 400), (4096, 400),
]  # fmt: skip


def workers(site: Site) -> set[bytes]:
    with redis.Redis.from_url(site.env["REDIS_URL"]) as client:
        return set(client.smembers(Keys().workers))


@pytest.mark.parametrize("way", WAYS)
async def test_oc_07_max_tokens(site: Site, way: str) -> None:
    before = workers(site)
    for value, status in MAX_TOKENS:
        fields = {} if value is ABSENT else {"max_tokens": value}
        answer = await ask(site, way, say("over"), **fields)
        assert answer.status == status, (way, value, answer.raw[:200])
        if status == 400:
            assert (answer.error or {})["param"] in ("max_tokens", "max_output_tokens", "max_completion_tokens")
        elif value == 1:
            assert (answer.finish, answer.tokens, answer.text) == (["length"], 1, "o")
        else:
            assert (answer.finish, answer.text) == (["stop"], "over")
    # Left out where nothing else ends it: up to the end of the context, which the answer's count shows.
    endless = await ask(site, way, "on and on", ignore_eos=True)
    assert endless.finish == ["length"]
    assert endless.prompt_tokens + endless.tokens == 4096
    assert workers(site) == before
    assert site.processes[1].poll() is None


async def test_oc_08_limits_by_their_other_names_are_never_dropped(site: Site) -> None:
    alone = await ask(site, f"{CHAT} stream", max_completion_tokens=5)
    assert (alone.tokens, alone.finish) == (5, ["length"])
    for fields in ({"max_tokens": 50, "max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 50}):
        both = await ask(site, f"{CHAT} json", **fields)
        assert (both.tokens, both.finish) == (5, ["length"])
    known = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}
    names = ("max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_length", "n_predict", "num_predict")
    for path in PATHS:
        for name in names:
            answer = await ask(site, f"{path} json", **{name: 5})
            if known.get(path) == name:
                assert answer.tokens == 5
            else:
                assert answer.status == 400, (path, name)
                assert (answer.error or {})["param"] == name


async def test_oc_08_the_operators_cap_holds_everywhere(site: Site) -> None:
    with live.another_server(site, SLUICE_MAX_TOKENS_LIMIT="6") as (url, _):
        capped = live.at(site, url)
        for way in WAYS:
            free = await ask(capped, way, ignore_eos=True)
            assert (free.tokens, free.finish) == (6, ["length"]), way
            over = await ask(capped, way, max_tokens=7)
            assert over.status == 400
            assert "at most 6" in (over.error or {})["message"]
        mixed = await ask(capped, f"{CHAT} json", max_tokens=7, max_completion_tokens=5)
        assert mixed.tokens == 5


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOLD: dict[str, Any] = {
    "null beside calls": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ],
    "no content beside calls": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sun"}]},
    ],
    "null as arguments": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": " null"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": None},
    ],
    "null of a user": [{"role": "user", "content": None}],
    "empty parts": [{"role": "user", "content": []}],
    "null of an assistant": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}],
    "calls null": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": None}],
    "calls empty": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": []}],
    "null fields of a client's own object": [
        {"role": "user", "content": "q", "name": None},
        {
            "role": "assistant", "content": "a", "refusal": None, "audio": None, "function_call": None,
            "annotations": [], "tool_calls": None,
        },
    ],
    "two systems": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}],
    "system last": [{"role": "user", "content": "q"}, {"role": "system", "content": "s"}],
    "users in a row": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "developer": [{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}],
}  # fmt: skip
MISSHAPEN: dict[str, Any] = {
    "unknown role": [{"role": "wizard", "content": "x"}],
    "no role": [{"content": "x"}],
    "no content": [{"role": "user"}],
    "content a number": [{"role": "user", "content": 5}],
    "content an object": [{"role": "user", "content": {"type": "text", "text": "x"}}],
    "an image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    "part without text": [{"role": "user", "content": [{"type": "text"}]}],
    "part text null": [{"role": "user", "content": [{"type": "text", "text": None}]}],
    "tool without call id": [{"role": "tool", "content": "x"}],
    "tool of another call": [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "other", "content": "x"},
    ],
    "tool without any call": [{"role": "user", "content": "q"}, {"role": "tool", "tool_call_id": "c1", "content": "x"}],
    "tool before its call": [
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ],
    "tool after an answer without calls": [
        {"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ],
    "call without function": [{"role": "assistant", "tool_calls": [{"id": "c1", "type": "function"}]}],
    "call arguments no text": [
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}],
        }
    ],
    "old function role": [{"role": "function", "name": "f", "content": "x"}],
    "message null": [None],
    "messages null": None,
    "messages empty": [],
}


@pytest.mark.parametrize("way", [w for w in WAYS if not w.startswith((COMPLETIONS, RESPONSES))])
async def test_oc_10_shapes_of_messages(site: Site, way: str) -> None:
    for name, messages in TOLD.items():
        answer = await ask(site, way, messages=messages, **_instead(way), max_tokens=2)
        assert answer.status == 200, (name, answer.error)
    for name, messages in MISSHAPEN.items():
        if messages is None and not way.startswith(CHAT):
            continue  # null is as absent, and there is no prompt then either
        answer = await ask(site, way, messages=messages, **_instead(way), max_tokens=2)
        assert answer.status == 400, (name, answer.status)
        assert (answer.error or {})["param"].startswith("messages"), (name, answer.error)


def _instead(way: str) -> dict[str, Any]:
    """Where a prompt may be given too, none is."""
    return {} if way.startswith(CHAT) else {"prompt": ...}


async def test_oc_10_nothing_that_is_null_becomes_a_word(site: Site) -> None:
    async with site.client() as client:
        for name, messages in TOLD.items():
            counted = await client.post("/tokenize", json={"model": "demo", "messages": messages})
            shown = await client.post("/detokenize", json={"model": "demo", "tokens": counted.json()["tokens"]})
            text = shown.json()["prompt"]
            assert "None" not in text, name
            assert "null" not in text, name
            assert "undefined" not in text, name
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]
    asked = await ask(site, f"{RESPONSES} json", input=items, max_tokens=2)
    told = await ask(site, f"{CHAT} json", messages=TOLD["null beside calls"], max_tokens=2)
    assert asked.prompt_tokens == told.prompt_tokens


@pytest.mark.model
@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "f"}}]], ids=["plain", "tools"])
def test_oc_10_a_models_own_system_prompt_comes_at_most_once(model_folder: str, tools: list[dict[str, Any]]) -> None:
    tokenizer = ModelTokenizer(model_folder)
    for name, messages in TOLD.items():
        asked = msgspec.convert({"model": "real", "messages": messages, "tools": tools}, ChatBody)
        use = resolve(asked.tools, None, None)
        ids = prompts.chat_ids(tokenizer, prompts.conversation(asked.messages), use, 4096, {})
        text = tokenizer.decode(ids, skip_special=False)
        assert text.count("You are a helpful AI assistant") <= 1, name
        assert text.count("You can call functions.") == len(tools), name
        assert not re.search("None|null|undefined", text), name


def entries(path: str, answer: Answer) -> list[Any]:
    """The logprobs objects of an answer, in order."""
    objects = (
        [strict(p) for p in events(answer.raw) if p != "[DONE]"] if "data: " in answer.raw else [strict(answer.raw)]
    )
    return [c["logprobs"] for o in objects for c in o["choices"] if c["logprobs"]]


@pytest.mark.parametrize("mode", ["stream", "json"])
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("some words", {"max_tokens": 12}),
        (say(FAMILY + " end"), {"max_tokens": 200}),
        (say("abcdefgh"), {"max_tokens": 50, "stop": "ef"}),
        (say("aab then aaab"), {"max_tokens": 50, "stop": ["aaab"]}),
        ("some words", {"max_tokens": 8, "top_k": 1}),
    ],
    ids=["plain", "characters of many tokens", "stop", "held back", "top_k 1"],
)
async def test_oc_11_log_probabilities(site: Site, mode: str, text: str, fields: dict[str, Any]) -> None:
    chat = await ask(site, f"{CHAT} {mode}", text, logprobs=True, top_logprobs=5, **fields)
    content = [entry for part in entries(CHAT, chat) for entry in part["content"]]
    assert all(math.isfinite(e["logprob"]) and e["logprob"] <= 0 for e in content)
    assert all(len(e["top_logprobs"]) == 5 for e in content)
    assert all(math.isfinite(t["logprob"]) for e in content for t in e["top_logprobs"])
    raw = b"".join(bytes(e["bytes"]) for e in content)
    assert raw.decode(errors="ignore").startswith(chat.text.rstrip("\ufffd"))
    assert chat.tokens - len(content) in (0, 1)  # the one that ended it is counted, and no part of the answer
    legacy = await ask(site, f"{COMPLETIONS} {mode}", text, logprobs=5, **fields)
    parts = entries(COMPLETIONS, legacy)
    tokens = [t for part in parts for t in part["tokens"]]
    values = [v for part in parts for v in part["token_logprobs"]]
    offsets = [at for part in parts for at in part["text_offset"]]
    assert len(tokens) == len(values) == len(offsets)
    for token, at in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or legacy.text[at : at + len(token)] == token[: max(0, len(legacy.text) - at)]
    for token, value, top in zip(tokens, values, [top for part in parts for top in part["top_logprobs"]], strict=True):
        assert top[token] == value
        assert len(top) in (5, 6)
    assert legacy.tokens - len(tokens) in (0, 1)
    assert all(math.isfinite(v) for v in values)


async def test_oc_11_where_there_are_none_they_are_refused(site: Site) -> None:
    for way in (f"{GENERATE} stream", f"{GENERATE} json", "websocket", f"{RESPONSES} json"):
        for fields in ({"logprobs": True}, {"logprobs": 1}, {"top_logprobs": 2}):
            answer = await ask(site, way, max_tokens=2, **fields)
            assert (answer.status, (answer.error or {})["param"]) == (400, next(iter(fields))), (way, fields)
    wrong: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"logprobs": 5}), (CHAT, {"logprobs": True, "top_logprobs": 21}), (CHAT, {"top_logprobs": 1}),
        (CHAT, {"logprobs": True, "top_logprobs": -1}), (COMPLETIONS, {"logprobs": True}),
        (COMPLETIONS, {"logprobs": 21}), (COMPLETIONS, {"logprobs": -1}), (COMPLETIONS, {"top_logprobs": 1}),
    ]  # fmt: skip
    for path, fields in wrong:
        assert (await ask(site, f"{path} json", max_tokens=2, **fields)).status == 400, (path, fields)


# --- streamed text -----------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_st_01_characters_of_many_tokens(site: Site, way: str) -> None:
    answers = await asyncio.gather(*[ask(site, way, say(FAMILY), max_tokens=300) for _ in range(8)])
    for answer in answers:
        assert answer.text == FAMILY
        assert not any("\ufffd" in delta for delta in answer.deltas)
        for line in answer.raw.split("\n"):
            if line.startswith("data: {"):
                strict(line[6:])


@pytest.mark.parametrize("way", WAYS)
async def test_st_01_cut_in_the_middle_of_a_character(site: Site, way: str) -> None:
    size = len("好".encode())
    texts = {}
    for limit in range(1, 2 * size + 1):
        answer = await ask(site, way, say("好好"), max_tokens=limit)
        assert (answer.finish, answer.tokens) == (["length"], limit)
        texts[limit] = answer.text
    assert texts == {limit: "好" * (limit // size) for limit in texts}


async def test_st_01_a_prompt_of_token_ids_comes_back_as_its_text(site: Site) -> None:
    async with site.client() as client:
        ids = (await client.post("/tokenize", json={"model": "demo", "prompt": FAMILY})).json()["tokens"]
    for mode in ("stream", "json"):
        answer = await ask(site, f"{COMPLETIONS} {mode}", prompt=ids, echo=True, max_tokens=1)
        assert answer.text.startswith(FAMILY)
        cut = await ask(site, f"{COMPLETIONS} {mode}", prompt=ids[:-1], echo=True, max_tokens=1)
        assert cut.status == 200


STOPS: list[tuple[str, Any, str, str]] = [
    ("one two three", "two", "one ", "stop"),
    ("one two three", "e tw", "on", "stop"),
    ("xaaab", "aab", "xa", "stop"),
    ("aaaab", "aab", "aa", "stop"),
    ("ababac", "abac", "ab", "stop"),
    ("你好世界", "世", "你好", "stop"),
    ("a👨‍👩‍👧b", "👩", "a👨\u200d", "stop"),
    ("one two three", ["never", "three", "two", "###"], "one ", "stop"),
    ("one two three", ["two", "two three"], "one ", "stop"),
    ("one two three", ["e t", "two"], "on", "stop"),
    ("one two three", "two!", "one two three", "stop"),
    ("one two", "two three", "one two", "stop"),
    ("one two", "one", "", "stop"),
    ("line\nnext", "\n", "line", "stop"),
    ("one two three", None, "one two three", "stop"),
    ("one two three", [], "one two three", "stop"),
    ("say ENDING now", "END", "say ", "stop"),
]


@pytest.mark.parametrize("way", WAYS)
async def test_st_03_stop_strings(site: Site, way: str) -> None:
    answers = await asyncio.gather(*[ask(site, way, say(text), max_tokens=60, stop=stop) for text, stop, _, _ in STOPS])
    for answer, (text, stop, wanted, finish) in zip(answers, STOPS, strict=True):
        assert answer.text == wanted, (text, stop, answer.text)
        assert answer.finish == [finish]
        if way in STREAMS:
            # Nothing of what is held back is sent, and no empty deltas in its place.
            assert sum(not delta for delta in answer.deltas) <= 3, answer.deltas


@pytest.mark.parametrize("way", WAYS)
async def test_st_03_a_match_that_the_limit_cuts_off_is_given_out(site: Site, way: str) -> None:
    answer = await ask(site, way, say("one two three"), max_tokens=6, stop="two three")
    assert (answer.text, answer.finish) == ("one tw", ["length"])


@pytest.mark.parametrize("way", STREAMS)
async def test_st_06_something_is_heard_while_the_request_waits(site: Site, way: str) -> None:
    holder = body(f"{CHAT} stream", "x", model="one", max_tokens=60, ignore_eos=True)
    async with site.client() as client, client.stream("POST", CHAT, json=holder) as held:
        lines = held.aiter_lines()
        await anext(lines)
        answer = await ask(site, way, model="one", max_tokens=2)
        await held.aclose()
    assert (answer.status, answer.tokens, answer.finish) == (200, 2, ["length"])
    if way == "websocket":
        assert '"queued"' in answer.raw
    else:
        # 60 tokens at 20 a second, and a ping every 0.3 s of silence.
        assert answer.raw.count(": ping\n\n") >= 2


@pytest.mark.parametrize("path", PATHS)
async def test_st_06_something_is_heard_in_a_gap_of_the_answer(site: Site, path: str) -> None:
    with redis.Redis.from_url(site.env["REDIS_URL"]) as store:
        beats = [decode_worker_beat(store.get(Keys().worker_beat(name.decode()))) for name in workers(site)]
    asked = body(f"{path} stream", "x", model="slow", max_tokens=20, ignore_eos=True)
    heard, pings, stopped = b"", 0, False

    def tell(number: signal.Signals) -> None:
        for beat in beats:
            os.kill(beat.pid, number)

    async with site.client() as client, client.stream("POST", path, json=asked) as reply:
        try:
            async for piece in reply.aiter_raw():
                heard += piece
                if stopped:
                    pings += piece.count(b": ping\n\n")
                    if pings >= 3:
                        tell(signal.SIGCONT)
                elif b'"delta"' in piece or b'"text"' in piece:
                    stopped = True
                    tell(signal.SIGSTOP)
        finally:
            tell(signal.SIGCONT)
    assert pings >= 3
    assert (b'"response.incomplete"' if path == RESPONSES else b"data: [DONE]") in heard


@pytest.mark.parametrize("path", PATHS)
async def test_st_07_streams_are_neither_compressed_nor_gathered(site: Site, path: str) -> None:
    headers = {"Accept-Encoding": "gzip, br, deflate, zstd"}
    asked = body(f"{path} stream", "x", model="slow", max_tokens=10, ignore_eos=True)
    loop = asyncio.get_running_loop()
    async with site.client() as client, client.stream("POST", path, json=asked, headers=headers) as reply:
        assert "content-encoding" not in reply.headers
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.headers["x-accel-buffering"] == "no"
        times = [loop.time() async for piece in reply.aiter_raw() if b'"delta"' in piece or b'"text"' in piece]
    assert len(times) >= 8
    # Made at 20 tokens a second, heard over most of that time and not at its end.
    assert times[-1] - times[0] > 0.6 * 9 / 20
