"""Every field of OpenAI's request schemas: in the parameter table as supported, or refused by name.

The names are written out here, and held against the installed ``openai`` package: a version
of it that knows a new field fails the first test until somebody has decided about that field.
"""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import msgspec
import openai
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.responses import Response, ResponseStreamEvent, response_create_params

from apps.api import reference, upstream
from apps.api.schema.generation import ChatBody
from tests.apps.api import live
from tests.apps.api.live import Site

pytestmark = pytest.mark.timeout(180)

EVENTS = get_args(ResponseStreamEvent)
SAY: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
#: path -> a sound body, and the official names.
OFFICIAL: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (
        {"model": "demo", "messages": SAY, "max_tokens": 2},
        """audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages
        metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
        prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed
        service_tier stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity
        web_search_options""",
    ),
    "/v1/completions": (
        {"model": "demo", "prompt": "x", "max_tokens": 2},
        """best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
        stream stream_options suffix temperature top_p user""",
    ),
    "/v1/responses": (
        {"model": "demo", "input": "x", "max_output_tokens": 2},
        """access_programs background background_options context_management conversation image include input
        instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls
        previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
        safety_identifier service_tier store stream stream_options temperature text tool_choice tools top_logprobs
        top_p truncation user""",
    ),
    "/v1/embeddings": ({"model": "demo", "input": "x"}, "dimensions encoding_format input model user"),
}
TYPED: dict[str, tuple[type, ...]] = {
    "/v1/chat/completions": (
        chat_params.CompletionCreateParamsNonStreaming,
        chat_params.CompletionCreateParamsStreaming,
    ),
    "/v1/completions": (
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
    "/v1/responses": (
        response_create_params.ResponseCreateParamsNonStreaming,
        response_create_params.ResponseCreateParamsStreaming,
    ),
    "/v1/embeddings": (embedding_create_params.EmbeddingCreateParams,),
}
#: A value that OpenAI would take, for each field that is refused here.
SAMPLES: dict[str, Any] = {
    "access_programs": {"name": "x"}, "audio": {"voice": "alloy", "format": "wav"}, "background": True,
    "background_options": {"completion_window": "2h"}, "context_management": [{"type": "compaction"}],
    "conversation": "conv_1", "function_call": "auto", "functions": [{"name": "f"}], "image": {"detail": "low"},
    "include": ["message.output_text.logprobs"], "max_tool_calls": 3, "moderation": {"model": "x"},
    "prediction": {"type": "content", "content": "x"}, "prompt": {"id": "pmpt_1"}, "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h", "reasoning": {"effort": "low"}, "reasoning_effort": "low", "suffix": "x",
    "top_logprobs": 3, "verbosity": "low", "web_search_options": {},
}  # fmt: skip
#: Values of known fields that are OpenAI's and not offered here; the error names the field, or the part of it.
PARTLY: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"store": True}, "store"),
    ("/v1/chat/completions", {"service_tier": "priority"}, "service_tier"),
    ("/v1/chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("/v1/chat/completions", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
    ("/v1/chat/completions", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ("/v1/chat/completions", {"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation"),
    ("/v1/completions", {"logprobs": 21}, "logprobs"),
    ("/v1/completions", {"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation"),
    ("/v1/responses", {"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation"),
    ("/v1/responses", {"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ("/v1/responses", {"truncation": "auto"}, "truncation"),
    ("/v1/responses", {"service_tier": "flex"}, "service_tier"),
    ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "y"}}]},
     "messages[0].audio"),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools[0]"),
    ("/v1/responses", {"tool_choice": {"type": "file_search"}}, "tool_choice"),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
]  # fmt: skip


def names(path: str) -> set[str]:
    return set(OFFICIAL[path][1].split())


def table(path: str) -> dict[str, reference.Row]:
    """The rows about one endpoint, the shared ones included."""
    kind = dict(reference.BODIES)[f"POST {path}"]
    return {row.name: row for row in reference.rows(kind)}


@pytest.mark.parametrize("path", OFFICIAL)
def test_the_names_are_those_of_the_official_package(path: str) -> None:
    known = {name for kind in TYPED[path] for name in get_type_hints(kind)}
    assert names(path) == known


@pytest.mark.parametrize("path", OFFICIAL)
async def test_every_field_is_supported_or_refused_by_name(site: Site, path: str) -> None:
    rows, (base, _) = table(path), OFFICIAL[path]
    assert names(path) <= set(rows), "a field that the table does not know"
    async with site.client() as client:
        for name in sorted(names(path)):
            if rows[name].support != "refused" and name != "include":
                continue
            reply = await client.post(path, json={**base, name: SAMPLES[name]})
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, name), (name, error)
            assert error["code"] in ("unsupported_parameter", "invalid_value")
            absent = await client.post(path, json={**base, name: None})
            assert absent.status_code == 200, (name, absent.text)


@pytest.mark.parametrize(("path", "fields", "param"), PARTLY, ids=[f"{p} {f}" for p, f, _ in PARTLY])
async def test_what_is_not_offered_of_a_known_field_is_refused_by_name(
    site: Site, path: str, fields: dict[str, Any], param: str
) -> None:
    async with site.client() as client:
        reply = await client.post(path, json={**OFFICIAL[path][0], **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param)


async def test_the_options_of_a_stream(site: Site) -> None:
    assert set(get_type_hints(ChatCompletionStreamOptionsParam)) == {"include_usage", "include_obfuscation"}
    async with site.client() as client:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            body = {**OFFICIAL[path][0], "stream": True, "stream_options": {"include_obfuscation": False}}
            reply = await client.post(path, json=body)
            assert reply.status_code == 200
            assert "obfuscation" not in reply.text


async def test_responses_have_every_field_that_the_official_package_knows(site: Site) -> None:
    function = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    call = '[[say:so <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>]]'
    kinds: dict[str, Any] = {kind.model_fields["type"].annotation.__args__[0]: kind for kind in get_args(EVENTS[0])}
    async with site.client() as client:
        for fields in (
            {"input": "x", "max_output_tokens": 3},
            {"input": "x", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 3},
            {"input": call, "tools": [function]},
            {"input": call, "tools": [function], "tool_choice": {"type": "function", "name": "f"}},
            {"input": "x", "instructions": "y", "metadata": {"a": "b"}, "store": False, "max_output_tokens": 3},
        ):
            whole = await client.post("/v1/responses", json={"model": "demo", **fields})
            Response.model_validate(whole.json())
            stream = await client.post("/v1/responses", json={"model": "demo", "stream": True, **fields})
            for event in map(json.loads, live.events(stream.text)):
                kinds[event["type"]].model_validate(event)


async def test_a_kept_response_is_told_whole(site: Site) -> None:
    client = openai.OpenAI(base_url=f"{site.url}/v1", api_key=site.key, max_retries=0)
    made = client.responses.create(model="demo", input="x", max_output_tokens=2)
    assert client.responses.retrieve(made.id, stream=False).id == made.id
    for fields, name in (
        ({"stream": True}, "stream"), ({"include": ["message.output_text.logprobs"]}, "include[]"),
        ({"stream": True, "starting_after": 2}, "st"), ({"extra_query": {"foo": 1}}, "foo"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.retrieve(made.id, **fields)  # type: ignore[call-overload]
        assert str(refused.value.param).startswith(name)


INEFFECTIVE: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ("/tokenize", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ("/tokenize", {"messages": SAY, "add_special_tokens": False}, "add_special_tokens"),
    ("/tokenize", {"messages": SAY, "prompt": "x"}, "prompt"),
    ("/tokenize", {"messages": None, "prompt": None}, "prompt"),
    ("/generate", {"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ("/generate", {"prompt": "x", "messages": SAY}, "prompt"),
    ("/generate", {"prompt": None}, "prompt"),
    ("/v1/chat/completions", {**OFFICIAL["/v1/chat/completions"][0], "top_logprobs": 2}, "top_logprobs"),
    ("/v1/chat/completions", {**OFFICIAL["/v1/chat/completions"][0], "tool_choice": "required"}, "tool_choice"),
    *(
        ("/v1/chat/completions", {**OFFICIAL["/v1/chat/completions"][0], **fields}, next(iter(fields)))
        for fields in (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": []},
            {"tool_choice": "required", "tools": []},
            {"parallel_tool_calls": False},
            {"parallel_tool_calls": True, "tools": []},
            {"parallel_tool_calls": True, "tool_choice": "auto"},
        )
    ),
    ("/v1/responses", {"model": "demo", "input": "x", "tool_choice": "required"}, "tool_choice"),
    ("/v1/completions", {"model": "demo", "prompt": "x", "n": 2, "best_of": 1}, "best_of"),
    ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
]


async def test_what_widespread_clients_say_of_tools_that_they_do_not_send_is_taken(site: Site) -> None:
    async with site.client() as client:
        for path in ("/v1/chat/completions", "/v1/responses"):
            for choice in ("none", "auto", None):
                for tools in ({}, {"tools": None}, {"tools": []}):
                    more = {"parallel_tool_calls": False} if path == "/v1/responses" else {}
                    reply = await client.post(path, json={**OFFICIAL[path][0], "tool_choice": choice, **tools, **more})
                    assert reply.status_code == 200, (path, choice, tools, reply.text)


def test_an_upstream_is_told_of_tools_only_where_there_are_any() -> None:
    """Several refuse an empty list of tools, and any choice without tools."""
    function = {"type": "function", "function": {"name": "f"}}
    for tools in (None, [], [function]):
        raw = {"model": "m", "messages": SAY, "tools": tools, "tool_choice": "auto"}
        told = json.loads(upstream.chat_text(msgspec.convert(raw, ChatBody)))
        assert set(told) == ({"messages", "tools", "tool_choice"} if tools else {"messages"})


@pytest.mark.parametrize(("path", "body", "param"), INEFFECTIVE, ids=[f"{p} {q}" for p, _, q in INEFFECTIVE])
async def test_what_could_have_no_effect_beside_the_rest_is_refused(
    site: Site, path: str, body: dict[str, Any], param: str
) -> None:
    async with site.client() as client:
        reply = await client.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_null_is_as_absent(site: Site) -> None:
    async with site.client() as client:
        for path, body in (
            (
                "/tokenize",
                {"prompt": "x", "messages": None, "tools": None, "chat_template_kwargs": None, "model": None},
            ),
            ("/tokenize", {"prompt": None, "messages": SAY, "add_special_tokens": None, "return_token_strs": None}),
            ("/generate", {"prompt": None, "messages": SAY, "max_tokens": 2, "stream": None, "model": None}),
        ):
            assert (await client.post(path, json=body)).status_code == 200, (path, body)
        for path, (base, _) in OFFICIAL.items():
            if path != "/v1/embeddings":
                absent = dict.fromkeys(names(path) - set(base), None)
                assert (await client.post(path, json={**base, **absent})).status_code == 200, path
        item = {"type": None, "role": "user", "content": "x", "id": None, "status": None}
        response = await client.post("/v1/responses", json={"model": "demo", "input": [item], "max_output_tokens": 2})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [*OFFICIAL, "/generate", "/tokenize", "/detokenize"])
async def test_a_field_that_nobody_knows_is_refused_by_name(site: Site, path: str) -> None:
    native: dict[str, Any] = {"prompt": "x"} if path != "/detokenize" else {"tokens": [1]}
    base = OFFICIAL[path][0] if path in OFFICIAL else {"model": "demo", **native}
    async with site.client() as client:
        for name in ("foo", "best_off", "Temperature", "max-tokens", "", "extra_body", "top_k "):
            reply = await client.post(path, json={**base, name: 1})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"], error["param"]) == (400, "unknown_parameter", name)


LONG = "y" * 9000
NAMED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"input": LONG}, "input"),
    ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
    ("/v1/responses", {"input": "x", "max_output_tokens": 5000}, "max_output_tokens"),
    ("/v1/responses",
     {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}},
     "text.format"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
     "tools[0].parameters"),
    ("/v1/chat/completions", {"messages": SAY, "max_completion_tokens": 5000}, "max_completion_tokens"),
    ("/v1/chat/completions", {"messages": SAY, "max_completion_tokens": 5000, "max_tokens": 6000},
     "max_completion_tokens"),
    ("/v1/chat/completions", {"messages": SAY, "max_tokens": 5000}, "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), NAMED, ids=[f"{p} {q}" for p, _, q in NAMED])
async def test_what_does_not_fit_is_named_as_the_endpoint_names_it(
    site: Site, path: str, body: dict[str, Any], param: str
) -> None:
    async with site.client() as client:
        for stream in (True, False):
            reply = await client.post(path, json={"model": "demo", "stream": stream, **body})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
            assert "max_" not in param or param in reply.json()["error"]["message"]


async def test_items_of_the_input_are_named_with_their_place(site: Site) -> None:
    async with site.client() as client:
        for item, param in (
            ({}, "input[1].role"),
            ({"role": "tool", "content": "x"}, "input[1].role"),
            ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
            ({"type": "reasoning"}, "input[1].type"),
            ({"role": "user", "content": "x", "a": 1}, "input[1].a"),
        ):
            body = {"model": "demo", "input": [{"role": "user", "content": "x"}, item]}
            error = (await client.post("/v1/responses", json=body)).json()["error"]
            assert error["param"] == param
            assert repr(param) in error["message"]


async def test_the_model_that_is_left_out_is_one_that_the_key_may_use(site: Site) -> None:
    key = live.manage(site, "apikey", "create", "brief", "--model", "slow", "--quiet").strip()
    async with site.client(key) as client:
        reply = await client.post("/generate", json={"prompt": "x", "max_tokens": 2, "stream": False})
        assert (reply.status_code, reply.json()["model"]) == (200, "slow")
