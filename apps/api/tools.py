"""Tools: how they get into the prompt, and how an answer is held to them.

Templates that know tools in the ``<tool_call>`` format get them natively. For
all others the system message says what the functions are and how to call them,
calls of earlier turns are written back as the blocks they were, and results
become user turns with ``<tool_response>``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from apps.api.errors import invalid
from apps.api.schema.messages import NamedChoice, Tool
from apps.api.toolparse import CLOSE, OPEN, ToolParser
from inference.messages import Grammar

MAX_CALLS = 8

_INTRODUCTION = """\
You can call functions. Their signatures stand between <tools> and </tools>, one JSON object per line:
<tools>
{signatures}
</tools>
To call a function, answer with its name and arguments as a JSON object between <tool_call> and </tool_call>:
<tool_call>
{{"name": "the function", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request and how far the model is free.

    Attributes:
        mode: ``auto``, ``required``, or ``named`` (then ``tools`` holds that one).
        parallel: whether one answer may hold several calls.
    """

    tools: tuple[Tool, ...]
    mode: str
    parallel: bool

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.tools]

    @property
    def constrained(self) -> bool:
        """Whether the answer is decoded under a grammar."""
        return self.mode != "auto" or any(tool.function.strict for tool in self.tools)

    def parser(self) -> ToolParser:
        return ToolParser(self.names, None if self.parallel and self.mode != "named" else 1)

    def signatures(self) -> list[dict[str, Any]]:
        """The tools as templates expect them."""
        return [signature(tool) for tool in self.tools]


def signature(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = parameters(tool)
    return {"type": "function", "function": function}


def parameters(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a function's arguments; without one: an object without properties."""
    if tool.function.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return tool.function.parameters


def resolve(tools: Sequence[Tool] | None, choice: str | NamedChoice | None, parallel: bool | None) -> ToolUse | None:
    """What ``tools``, ``tool_choice`` and ``parallel_tool_calls`` add up to; ``None``: no tools.

    Without tools, ``none`` and ``auto`` say what holds anyway, and widespread clients always
    send one of them; everything else needs tools.

    Raises:
        ApiError: a choice without tools, of a function that is not among them,
            or two functions of one name.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice is given without tools.", "tool_choice", "invalid_value")
        if parallel is not None:
            raise invalid("parallel_tool_calls is given without tools.", "parallel_tool_calls", "invalid_value")
        return None
    names = [tool.function.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise invalid(f"Two tools have the name {name!r}.", "tools", "invalid_value")
    for i, tool in enumerate(tools):
        kind = parameters(tool).get("type", "object")
        if kind != "object":
            raise invalid(
                "The parameters of a function must be a JSON schema of an object.",
                f"tools[{i}].function.parameters",
                "invalid_value",
            )
    if choice == "none":
        return None
    if isinstance(choice, NamedChoice):
        wanted = [tool for tool in tools if tool.function.name == choice.function.name]
        if not wanted:
            raise invalid(
                f"tool_choice names {choice.function.name!r}, which is not among the tools.",
                "tool_choice",
                "invalid_value",
            )
        return ToolUse(tuple(wanted), "named", parallel=False)
    return ToolUse(tuple(tools), choice or "auto", parallel is not False)


def grammar(use: ToolUse, content: dict[str, Any] | None = None) -> Grammar | None:
    """The constraint that makes every call valid; ``None`` where the model is free.

    Args:
        content: a JSON schema that an answer without calls has to obey.
    """
    if not use.constrained and content is None:
        return None
    several = use.parallel and use.mode != "named"
    more = f" more{{0,{MAX_CALLS - 1}}}" if several else ""
    lines = [f'calls: "{OPEN}" rest{more}']
    if use.mode in ("required", "named"):
        lines.append("start: calls")
    elif content is not None:
        lines += ["start: calls | content", f"content: %json {_json(content)}"]
    else:
        # Free text, or free text up to the first call: a lazy lexeme ends at the first marker.
        lines += [
            f"start: FREE? | opening rest{more}",
            f"opening[lazy]: /(?s:.*){OPEN}/",
            f"FREE: /(?s:.+)/ & ~/(?s:.*{OPEN}.*)/",
        ]
        lines.pop(0)
    options = " | ".join(f"call_{i}" for i in range(len(use.tools)))
    lines.append(f'rest: "\\n" ({options}) "\\n{CLOSE}" NL?')
    if several:
        lines.append(f'more: "{OPEN}" rest')
    lines.append('NL: "\\n"')
    for i, tool in enumerate(use.tools):
        lines.append(f"call_{i}: %json {_json(_call_schema(tool))}")
    return Grammar("lark", "\n".join(lines) + "\n")


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": _moved(parameters(tool), "#/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    }


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references (``#/$defs/...``) still hold where it has become a part of another one."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: to + value[1:] if key == "$ref" and isinstance(value, str) and value[:1] == "#" else _moved(value, to)
        for key, value in schema.items()
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- templates that do not know tools ---------------------------------------------------


def spell_out(messages: list[dict[str, Any]], use: ToolUse | None) -> list[dict[str, Any]]:
    """Rewrite a conversation so that a template without tools can render it."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            response = f"<tool_response>\n{message['content']}\n</tool_response>"
            if out and out[-1].get("_responses"):
                out[-1]["content"] += "\n" + response
            else:
                out.append({"role": "user", "content": response, "_responses": True})
        elif calls := message.get("tool_calls"):
            blocks = "\n".join(_block(call) for call in calls)
            text = message["content"]
            out.append({"role": "assistant", "content": f"{text}\n{blocks}" if text else blocks})
        else:
            out.append(dict(message))
    for message in out:
        message.pop("_responses", None)
    return introduce(out, use) if use is not None else out


def _block(call: dict[str, Any]) -> str:
    function = call["function"]
    return f"{OPEN}\n{_json({'name': function['name'], 'arguments': function['arguments']})}\n{CLOSE}"


def introduce(messages: list[dict[str, Any]], use: ToolUse) -> list[dict[str, Any]]:
    """Say what the functions are: at the end of the system message, or in one of its own."""
    text = _INTRODUCTION.format(signatures="\n".join(_json(s) for s in use.signatures()))
    if use.mode == "named":
        text += f"\nAnswer with a call of {use.tools[0].function.name}."
    elif use.mode == "required":
        text += "\nAnswer with a call."
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        joined = f"{first['content']}\n\n{text}" if first["content"] else text
        return [{**first, "content": joined}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def arguments_of(text: str) -> Any:
    """A call's arguments as templates want them: an object where they are one, an empty one for nothing and null."""
    try:
        value = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return text
    return {} if value is None else value
