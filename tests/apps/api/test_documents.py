"""The documents describe what really happens: valid, complete, and held against real answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from apps.api import asyncapi, documents, openapi, reference
from apps.api.schema.generation import ChatBody, Sampling
from apps.api.schema.refused import NO_EFFECT, REFUSED
from tests.apps.api.live import Site, chat
from tests.conftest import ROOT


def schema_of(path: str, method: str) -> dict[str, Any]:
    document = openapi.document()
    schema = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
    return {**schema, "components": document["components"]}


ASKED: list[tuple[str, str, str, Any]] = [
    ("/v1/chat/completions", "post", "/v1/chat/completions", chat(logprobs=True, top_logprobs=2)),
    ("/v1/completions", "post", "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 2, "logprobs": 1}),
    ("/v1/responses", "post", "/v1/responses", {"model": "demo", "input": "x", "max_output_tokens": 2}),
    ("/generate", "post", "/generate", {"prompt": "x", "max_tokens": 2, "stream": False}),
    ("/v1/models", "get", "/v1/models", None),
    ("/v1/models/{model}", "get", "/v1/models/demo", None),
    ("/tokenize", "post", "/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/detokenize", "post", "/detokenize", {"tokens": [104]}),
    ("/v1/tickets", "post", "/v1/tickets", {}),
]


@pytest.mark.parametrize(("path", "method", "url", "body"), ASKED, ids=[a[0] for a in ASKED])
async def test_answers_have_the_documented_shape(site: Site, path: str, method: str, url: str, body: Any) -> None:
    async with site.client() as client:
        reply = await client.request(method, url, json=body)
    assert reply.status_code == 200, reply.text
    jsonschema.Draft202012Validator(schema_of(path, method)).validate(reply.json())


def test_documents_are_public_and_every_route_is_described(site: Site) -> None:
    from apps.api.routing import http_routes

    document = httpx.get(f"{site.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    own = {"/openapi.json", "/asyncapi.json", "/docs"}
    served = {
        (route.template, method) for route in http_routes for method in route.methods if route.template not in own
    }
    assert described == served
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    page = httpx.get(f"{site.url}/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "max_completion_tokens" in page.text
    assert httpx.get(f"{site.url}/asyncapi.json").json()["asyncapi"] == "3.0.0"


async def test_what_takes_no_parameters_refuses_them_by_name(site: Site) -> None:
    async with site.client() as client:
        for path in ("/v1/tickets", "/v1/requests/gen-none/cancel"):
            for body in (b"", b" \n", b"{}", b" {} "):
                assert (await client.post(path, content=body)).status_code in (200, 404)
            for body, code, param in (
                (b'{"user": "x"}', "unknown_parameter", "user"),
                (b"[]", "invalid_value", None),
                (b"null", "invalid_value", None),
                (b"hello", "invalid_json", None),
            ):
                reply = await client.post(path, content=body)
                error = reply.json()["error"]
                assert (reply.status_code, error["code"], error["param"]) == (400, code, param)


def test_the_page_is_made_once() -> None:
    """It takes tens of milliseconds, in which the event loop serves nobody, and anybody may ask for it."""
    assert documents.page() is documents.page()


def test_asyncapi_examples_match_their_schemas() -> None:
    document = asyncapi.document()
    for name, message in document["components"]["messages"].items():
        schema = {**message["payload"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(asyncapi.EXAMPLES[name])


def test_the_parameter_table_is_complete_and_the_one_in_the_docs() -> None:
    names = {row.name for row in reference.rows(ChatBody)}
    assert names == set(ChatBody.__struct_fields__)
    for row in [*reference.rows(ChatBody), *reference.rows(Sampling)]:
        assert row.meaning, f"{row.name} has no meaning"
    fields = {name for _, kind in reference.BODIES for name in kind.__struct_fields__}
    assert set(REFUSED) | set(NO_EFFECT) <= fields
    written = (ROOT / "docs/api.md").read_text()
    assert reference.markdown() in written, "run: manage.py apidocs"


def test_no_schema_knows_a_field_that_validation_does_not() -> None:
    schemas = openapi.document()["components"]["schemas"]
    assert schemas["ChatBody"]["additionalProperties"] is False
    assert set(schemas["ChatBody"]["properties"]) == set(ChatBody.__struct_fields__)
    json.dumps(schemas)
