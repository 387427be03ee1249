"""Chat messages, tools and tool choice."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from apps.api.schema.base import Part, about

FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
ParticipantName = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[^\s<|\\/>]+$")]


class TextPart(Part, kw_only=True, tag_field="type", tag="text"):
    """The one kind of content part that is served."""

    text: str


Content = str | list[TextPart] | None


class SystemMessage(Part, kw_only=True, tag_field="role", tag="system"):
    """Instructions."""

    content: Content
    name: Annotated[ParticipantName, about("Put in front of the content as 'name: '.")] | None = None


class DeveloperMessage(Part, kw_only=True, tag_field="role", tag="developer"):
    """Instructions; the same as a system message."""

    content: Content
    name: ParticipantName | None = None


class UserMessage(Part, kw_only=True, tag_field="role", tag="user"):
    """What the user says."""

    content: Content
    name: ParticipantName | None = None


class FunctionCall(Part, kw_only=True):
    """A function's name and its arguments as JSON text."""

    name: FunctionName
    arguments: str


class ToolCall(Part, kw_only=True):
    """One call of an earlier answer."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class AssistantMessage(Part, kw_only=True, tag_field="role", tag="assistant"):
    """An earlier answer; null content is the same as an empty one."""

    content: Content = None
    tool_calls: list[ToolCall] | None = None
    name: ParticipantName | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ToolMessage(Part, kw_only=True, tag_field="role", tag="tool"):
    """What a called function returned."""

    content: Content
    tool_call_id: Annotated[str, Meta(min_length=1, max_length=256)]
    name: Annotated[str, about("Accepted without effect; the call is known by its id.", max_length=256)] | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(Part, kw_only=True):
    """A function that the model may call."""

    name: FunctionName
    description: Annotated[str, Meta(max_length=65536)] | None = None
    parameters: Annotated[dict[str, Any], about("A JSON schema of an object.")] | None = None
    strict: (
        Annotated[bool, about("Arguments obey the schema also where the call is the model's own choice.")] | None
    ) = None


class Tool(Part, kw_only=True):
    """A tool; functions are the one kind there is."""

    type: Literal["function"]
    function: Function


class NamedFunction(Part, kw_only=True):
    name: FunctionName


class NamedChoice(Part, kw_only=True):
    """Calls exactly this function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def text_of(content: str | list[TextPart] | None) -> str:
    """The one text of a content: parts are joined as they are, null is empty."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)
