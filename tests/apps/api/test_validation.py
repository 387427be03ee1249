"""What is refused, how, and that both modes and all endpoints agree on it (OC-03, OC-07, OC-08)."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.api.errors import ApiError
from apps.api.schema.base import Decoder
from apps.api.schema.generation import ChatBody, CompletionBody, GenerateBody
from apps.api.schema.refused import REFUSED
from apps.api.schema.responses import ResponseBody
from apps.api.schema.socket import SocketMessage
from tests.apps.api.live import Site, chat

decode_chat = Decoder(ChatBody)

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 33}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": 2**63}, "max_tokens"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"seed": "x"}, "seed"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {str(2**63): 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"logit_bias": [1, 2]}, "logit_bias"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "q"}, {"role": "tool", "tool_call_id": "c", "content": "x"}]},
     "messages[1].role"),
    ({"response_format": {"type": "bogus"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "bogus"}}}},
     "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": 1e9}, "timeout"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"n": 2, "resumable": True}, "resumable"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages"),
    ({"foo_unknown": 1}, "foo_unknown"),
    *(({name: "x"}, name) for name in ("functions", "prediction", "verbosity", "audio", "reasoning_effort")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40])
async def test_oc_03_bad_field_is_refused_alike_in_both_modes(site: Site, fields: Any, param: str) -> None:
    async with site.client() as client:
        plain = await client.post("/v1/chat/completions", json=chat(**fields))
        stream = await client.post("/v1/chat/completions", json=chat(**fields, stream=True))
    assert plain.status_code == stream.status_code == 400
    assert plain.json() == stream.json()
    error = plain.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": "10"}, "'max_tokens': expected an integer or null, got a string."),
        ({"temperature": True}, "'temperature': expected a number or null, got a boolean."),
        ({"top_p": 1.1}, "'top_p': expected a number <= 1.0."),
        ({"stop": 5}, "'stop': expected a string, an array or null, got an integer."),
        ({"stop": [""]}, "'stop[0]': expected a string of length >= 1."),
        ({"messages": None}, "'messages': expected an array, got null."),
        ({"logit_bias": {"`int`": 1}}, "'logit_bias': expected an integer, got a string as a key."),
        ({"messages": [{"role": "`int | null`", "content": ""}]}, "'messages[0].role': invalid value '`int | null`'."),
    ],
)
def test_what_was_expected_is_said_in_words(fields: dict[str, Any], said: str) -> None:
    """Not in the names of Python's types; and what the client has sent is quoted as it is."""
    with pytest.raises(ApiError) as refused:
        decode_chat(json.dumps(chat(**fields)).encode())
    assert refused.value.message == f"Invalid value for {said}"


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"null", b"5", b'"x"', b"\xff", b"{" * 100_000, b'{"a":' * 50_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"])
async def test_oc_03_broken_bodies(site: Site, path: str, raw: bytes) -> None:
    async with site.client() as client:
        reply = await client.post(path, content=raw)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


async def test_oc_03_unknown_model_is_404_everywhere(site: Site) -> None:
    async with site.client() as client:
        for path, body in (
            ("/v1/chat/completions", chat(model="nope")),
            ("/v1/completions", {"model": "nope", "prompt": "x"}),
            ("/generate", {"model": "nope", "prompt": "x"}),
            ("/tokenize", {"model": "nope", "prompt": "x"}),
        ):
            reply = await client.post(path, json=body)
            assert reply.status_code == 404, path
            assert reply.json()["error"]["code"] == "model_not_found"


async def test_order_of_checks(site: Site) -> None:
    async with site.client("wrong") as client:
        assert (await client.post("/v1/chat/completions", content=b"{")).status_code == 401
    async with site.client() as client:
        # The schema comes before the model, the model before the prompt.
        assert (await client.post("/v1/chat/completions", json=chat(model="nope", n=0))).status_code == 400
        assert (await client.post("/v1/chat/completions", json=chat("x" * 9000, model="nope"))).status_code == 404


async def test_a_key_for_one_model_sees_no_other(site: Site) -> None:
    async with site.client(site.demo_only) as client:
        assert [m["id"] for m in (await client.get("/v1/models")).json()["data"]] == ["demo"]
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        assert (await client.post("/v1/chat/completions", json=chat(model="slow"))).status_code == 404
        assert (await client.get("/v1/models/slow")).status_code == 404


async def test_high_priority_needs_the_admin_scope(site: Site) -> None:
    async with site.client() as client:
        reply = await client.post("/v1/chat/completions", json=chat(priority="high"))
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "priority_not_allowed")
    async with site.client(site.admin) as client:
        assert (await client.post("/v1/chat/completions", json=chat(priority="high"))).status_code == 200


BASES: dict[type, dict[str, Any]] = {
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    CompletionBody: {"model": "m", "prompt": "x"},
    ResponseBody: {"model": "m", "input": "x"},
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields_are_refused_by_name_and_null_is_absent(name: str) -> None:
    kinds = [kind for kind in BASES if get_type_hints(kind).get(name) is type(None)]
    assert kinds or name in ("include",)
    for kind in kinds:
        decode: Decoder[Any] = Decoder(kind)
        decode(json.dumps({**BASES[kind], name: None}).encode())
        with pytest.raises(ApiError) as caught:
            decode(json.dumps({**BASES[kind], name: {"a": 1}}).encode())
        assert caught.value.code == "unsupported_parameter"
        assert name in caught.value.message


@pytest.mark.parametrize("name", [" - at `$" * 100_000 + "\n", "`$" + " - at `$." * 100_000 + "x\n`"])
@pytest.mark.timeout(30)
def test_a_name_that_looks_like_many_paths_costs_nothing_and_is_not_repeated_in_full(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode_chat(json.dumps({name: 1}).encode())
    assert caught.value.code == "unknown_parameter"
    assert len(caught.value.body()) < 2000


def test_the_last_place_named_is_the_fields() -> None:
    with pytest.raises(ApiError) as caught:
        decode_chat(b'{"model": "x", "messages": [{"role": "user", "content": "x", "a - at `$.b`": 1}]}')
    assert caught.value.param == "messages[0].a - at `$.b`"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_names = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *GenerateBody.__struct_fields__})


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(_names), _json, max_size=6),
    st.sampled_from((ChatBody, CompletionBody, GenerateBody)),
)
def test_any_json_is_decoded_or_refused_with_an_error_object(body: dict[str, Any], kind: type) -> None:
    base: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    decode: Decoder[Any] = Decoder(kind)
    raw = json.dumps({**{k: v for k, v in base.items() if k in kind.__struct_fields__}, **body}).encode()
    try:
        decode(raw)
    except ApiError as error:
        assert error.status == 400
        assert set(json.loads(error.body())["error"]) == {"message", "type", "param", "code"}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_refused_cleanly(raw: bytes) -> None:
    for kind in (ChatBody, SocketMessage):
        decode: Decoder[Any] = Decoder(kind)
        with pytest.raises(ApiError):
            decode(raw)


@pytest.mark.timeout(120)
async def test_what_is_nested_too_deeply_is_refused_wherever_that_is_found(site: Site) -> None:
    async with site.client() as client:
        for depth in range(200, 1000, 50):
            deep = '{"properties":' * depth + "{}" + "}" * depth
            function = '"name": "f", "parameters": ' + deep
            for extra in (
                '"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": ' + deep + "}}",
                '"tools": [{"type": "function", "function": {' + function + "}}]",
                '"tools": [{"type": "function", "function": {' + function + ', "strict": true}}]',
            ):
                body = json.dumps(chat())[:-1] + ", " + extra + "}"
                reply = await client.post("/v1/chat/completions", content=body)
                # The scripted engine knows no schemas: what passes fails there, by the engine's own error.
                assert reply.status_code in (200, 400) or reply.json()["error"]["code"] == "engine_error", depth
