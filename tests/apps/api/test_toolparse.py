"""Calls are found wherever the stream happens to be cut, and nothing of an answer gets lost."""

from __future__ import annotations

import json
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.api import tools
from apps.api.render.chat import whole_calls
from apps.api.schema.messages import Function, Tool
from apps.api.toolparse import CallDelta, ToolParser
from inference.engine.grammar_check import validate_grammar

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris {\\"}"}}\n</tool_call>'


def parse(text: str, cuts: list[int], limit: int | None = None) -> tuple[str, list[dict[str, object]]]:
    parser = ToolParser({"get_weather", "b"}, limit)
    places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    content, calls = "", list[CallDelta]()
    for begin, end in pairwise(places):
        part = parser.feed(text[begin:end])
        content += part.content
        calls += part.calls
    rest = parser.finish()
    return content + rest.content, whole_calls(calls + rest.calls)


@given(st.lists(st.integers(0, 500), max_size=12))
def test_a_call_between_texts(cuts: list[int]) -> None:
    content, calls = parse(f"Let me look. \n{CALL}\n", cuts)
    assert content == "Let me look."
    assert len(calls) == 1
    assert calls[0]["function"]["name"] == "get_weather"  # type: ignore[index]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": 'Paris {"}'}  # type: ignore[index]


@given(st.lists(st.integers(0, 500), max_size=12))
def test_two_calls_and_the_limit(cuts: list[int]) -> None:
    other = '<tool_call>{"arguments": {"x": [1]}, "name": "b"}</tool_call>'
    content, calls = parse(CALL + "\n" + other, cuts)
    assert content == ""
    assert [call["function"]["name"] for call in calls] == ["get_weather", "b"]  # type: ignore[index]
    assert len(parse(CALL + "\n" + CALL, cuts, limit=1)[1]) == 1


@given(
    st.sampled_from(
        [
            "no call at all",
            "a < b <tool and <tool_cal",
            "  spaces  \n\n",
            '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
            "x <tool_call>not json</tool_call> y",
            '<tool_call>{"name": "get_weather", "arguments": 5}</tool_call>',
            '<tool_call>{"name": ["get_weather"], "arguments": {}}</tool_call>',
            "<tool_call>" + "[" * 3000 + "</tool_call>",
            "<tool_call>",
            "",
        ]
    ),
    st.lists(st.integers(0, 500), max_size=12),
)
def test_what_is_no_call_stays_text(text: str, cuts: list[int]) -> None:
    assert parse(text, cuts) == (text, [])


OPENED = CALL.removesuffix("</tool_call>")


@given(st.lists(st.integers(0, 500), max_size=12))
def test_a_call_without_its_closing_mark(cuts: list[int]) -> None:
    """What came after one was swallowed, and so was a second call where both came at once."""
    for text, content, count in (
        (f"{OPENED}{CALL}", "", 2),
        (f"so {OPENED}I asked. {CALL} x", "so\nI asked. x", 2),
        (f"{OPENED[:-2]}{CALL}", "", 2),  # nor the brace
        (OPENED[:-2] + ', "id": "}<"' + OPENED[-2:] + CALL, "", 2),
        (f"{OPENED}That is all.", "\nThat is all.", 1),
        (f"{OPENED[:-2]} That is all.", " That is all.", 1),
        (f"{OPENED}</tool", "", 1),
        (OPENED[:-2] + ', "id": "c', "", 1),
        (OPENED[:-2] + "}}" + "</tool_call>", "", 1),
    ):
        shown, calls = parse(text, cuts)
        assert (shown, len(calls)) == (content, count), text
        assert all(json.loads(call["function"]["arguments"]) for call in calls)  # type: ignore[index]


@given(st.lists(st.integers(0, 500), max_size=12))
def test_what_stands_behind_a_call_comes_behind_it(cuts: list[int]) -> None:
    parser, pieces = ToolParser({"get_weather"}), list[str | CallDelta]()
    text = f"before {CALL} between {CALL} behind"
    places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    for begin, end in pairwise(places):
        pieces += parser.feed(text[begin:end]).pieces
    pieces += parser.finish().pieces
    kinds = ["text" if isinstance(piece, str) else piece.index for piece in pieces]
    assert [kind for kind, _ in groupby(kinds)] == ["text", 0, "text", 1, "text"]


def test_arguments_that_only_escapes_can_hold_stay_escaped() -> None:
    _, calls = parse('<tool_call>{"arguments": {"a": "\\ud800", "b": "\u00e9"}, "name": "b"}</tool_call>', [])
    arguments = str(calls[0]["function"]["arguments"])  # type: ignore[index]
    assert json.loads(arguments) == {"a": "\ud800", "b": "\u00e9"}
    assert arguments.encode()


def test_a_call_that_is_cut_off_keeps_what_it_has() -> None:
    content, calls = parse(CALL[:60], [])
    assert content == ""
    assert calls[0]["function"] == {"name": "get_weather", "arguments": CALL[CALL.index('{"city') : 60]}


def test_the_name_is_known_before_the_arguments_are() -> None:
    parser = ToolParser({"get_weather"})
    first = parser.feed(CALL[:53]).calls
    assert first[0].name == "get_weather"
    assert first[0].id


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_the_schema_of_a_function_may_refer_to_its_own_parts(choice: str) -> None:
    part = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Part"}, {"type": "null"}]}}}
    schema = {"type": "object", "properties": {"part": {"$ref": "#/$defs/Part"}, "whole": {"$ref": "#"}}}
    function = Function(name="f", strict=True, parameters={**schema, "$defs": {"Part": part}})
    use = tools.resolve([Tool(type="function", function=function)], choice, None)
    assert use is not None
    made = tools.grammar(use)
    assert made is not None
    validate_grammar(made)
    # "whole" is the arguments again, not the call that they are a part of.
    assert made.spec.count('"#/properties/arguments"') == 1
