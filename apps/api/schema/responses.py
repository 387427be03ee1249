"""``POST /v1/responses``: OpenAI's newer form of the same question."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from apps.api.schema.base import Part, Tokens, about
from apps.api.schema.generation import Name, Sampling, Scalar
from apps.api.schema.messages import FunctionName


class InputText(Part, kw_only=True, tag_field="type", tag="input_text"):
    """Text of a user, a system or a developer."""

    text: str


class OutputText(Part, kw_only=True, tag_field="type", tag="output_text"):
    """Text of an earlier answer."""

    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Meta(max_length=0)] | None = None


class InputMessage(Part, kw_only=True, tag_field="type", tag="message"):
    """A message; ``type`` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class InputCall(Part, kw_only=True, tag_field="type", tag="function_call"):
    """A call of an earlier answer."""

    call_id: Annotated[str, Meta(min_length=1, max_length=256)]
    name: FunctionName
    arguments: str
    id: str | None = None
    status: str | None = None


class InputResult(Part, kw_only=True, tag_field="type", tag="function_call_output"):
    """What a called function returned."""

    call_id: Annotated[str, Meta(min_length=1, max_length=256)]
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None


InputItem = InputMessage | InputCall | InputResult


class FlatTool(Part, kw_only=True):
    """A function the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(Part, kw_only=True):
    """Calls exactly this function."""

    type: Literal["function"]
    name: FunctionName


class PlainText(Part, kw_only=True, tag_field="type", tag="text"):
    """Free text."""


class AnyObject(Part, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class SchemaText(Part, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that obeys a schema."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Part, kw_only=True):
    """What the text of the answer looks like."""

    format: PlainText | AnyObject | SchemaText | None = None
    verbosity: None = None


class ResponseStreamOptions(Part, kw_only=True):
    """How the stream is sent."""

    include_obfuscation: Annotated[bool, about("false only: nothing is padded.")] | None = None


class ResponseBody(Sampling, kw_only=True):
    """``POST /v1/responses``."""

    model: Annotated[Name, about("Alias of a served model.")]
    input: Annotated[
        str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)],
        about("A text, or messages, function calls and their results."),
    ]
    instructions: Annotated[str, about("A system message in front of the conversation; not carried over.")] | None = (
        None
    )
    max_output_tokens: Annotated[Tokens, about("Upper bound of generated tokens.")] | None = None
    stream: Annotated[bool, about("Server-sent events instead of one body.")] | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[FlatTool], about("Functions the model may call.", max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: Annotated[bool, about("false: at most one call per answer.")] | None = None
    text: Annotated[TextOptions, about("format: text, json_object or json_schema, enforced.")] | None = None
    previous_response_id: (
        Annotated[str, about("Go on after a kept response, within the retention time.", min_length=1, max_length=128)]
        | None
    ) = None
    store: Annotated[bool, about("false: do not keep the response. Default true, for the retention time.")] | None = (
        None
    )
    metadata: Annotated[dict[str, str], about("Kept and returned with the response.", max_length=16)] | None = None
    truncation: Annotated[Literal["disabled"], about("disabled only: nothing is cut away.")] | None = None
    service_tier: Annotated[Literal["auto", "default"], about("auto or default only.")] | None = None
    chat_template_kwargs: (
        Annotated[dict[str, Scalar], about("Variables for the model's chat template.", max_length=16)] | None
    ) = None
    user: Annotated[str, about("Accepted without effect.", max_length=1024)] | None = None
    safety_identifier: Annotated[str, about("Accepted without effect.", max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, about("Accepted without effect.", max_length=1024)] | None = None
    max_tokens: None = None
    resumable: None = None
    access_programs: None = None
    background: None = None
    background_options: None = None
    context_management: None = None
    conversation: None = None
    image: None = None
    include: Annotated[list[Any], about("Empty only.", max_length=0)] | None = None
    max_tool_calls: None = None
    moderation: None = None
    prompt: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning: None = None
    top_logprobs: None = None
