"""The parameter tables of the documentation, read off the types that validate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from apps.api.schema.embeddings import EmbeddingBody
from apps.api.schema.generation import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    Sampling,
    TokenizeBody,
)
from apps.api.schema.refused import NO_EFFECT, REFUSED
from apps.api.schema.responses import ResponseBody
from apps.api.schema.socket import SocketAttach, SocketCancel, SocketGenerate, SocketPing

BODIES: list[tuple[str, type]] = [
    ("POST /v1/chat/completions", ChatBody),
    ("POST /v1/completions", CompletionBody),
    ("POST /v1/responses", ResponseBody),
    ("POST /generate", GenerateBody),
    ("POST /v1/embeddings", EmbeddingBody),
    ("POST /tokenize", TokenizeBody),
    ("POST /detokenize", DetokenizeBody),
    ("generate on the WebSocket", SocketGenerate),
    ("cancel on the WebSocket", SocketCancel),
    ("attach on the WebSocket", SocketAttach),
    ("ping on the WebSocket", SocketPing),
]


@dataclass(frozen=True)
class Row:
    """One parameter as the tables show it."""

    name: str
    support: str
    kind: str
    meaning: str
    limits: str
    error: str


def rows(kind: type[msgspec.Struct], *, common: bool = True) -> list[Row]:
    """The parameters of one body.

    Args:
        common: include those that every generating endpoint shares.
    """
    schemas = msgspec.json.schema_components([kind])[1]
    schema = schemas[kind.__name__]
    required = set(schema.get("required", ()))
    shared: dict[str, Any] = {}
    if not common and kind is not Sampling:
        shared = msgspec.json.schema_components([Sampling])[1]["Sampling"]["properties"]
    out = []
    for name, field in schema["properties"].items():
        if field == shared.get(name):
            continue
        if field == {"type": "null", "default": None}:
            out.append(Row(name, "refused", "null", REFUSED[name], "null only", "unsupported_parameter"))
            continue
        # Responses are kept and give their metadata back; the other endpoints do neither.
        idle = name in NO_EFFECT and not (kind is ResponseBody and name in ("metadata", "store"))
        support = "required" if name in required else "no effect" if idle else "supported"
        meaning = (
            (NO_EFFECT[name] if idle else "")
            or _meaning(field, schemas)
            or ("Which message it is." if name == "type" else "")
        )
        error = "missing_required_parameter, invalid_value" if name in required else "invalid_value"
        out.append(Row(name, support, _kind(field, schemas), meaning, _limits(field), error))
    return out


def _meaning(field: dict[str, Any], schemas: dict[str, Any]) -> str:
    """The field's own description, or that of the object it is."""
    for option in [field, *field.get("anyOf", ())]:
        if "description" in option:
            return str(option["description"])
        if "$ref" in option:
            return str(schemas[option["$ref"].rpartition("/")[2]].get("description", ""))
    return ""


def _options(field: dict[str, Any]) -> list[dict[str, Any]]:
    options = [option for option in field.get("anyOf", [field]) if option.get("type") != "null"]
    return [inner for option in options for inner in (_options(option) if "anyOf" in option else [option])]


def _kind(field: dict[str, Any], schemas: dict[str, Any]) -> str:
    names = []
    for option in _options(field):
        if "$ref" in option:
            name = option["$ref"].rpartition("/")[2]
            tag = next(
                (p["enum"][0] for p in schemas[name].get("properties", {}).values() if len(p.get("enum", ())) == 1), ""
            )
            names.append(f"object {tag}".strip())
        elif "enum" in option:
            names.append(" / ".join(str(value) for value in option["enum"] if value is not None))
        elif option.get("type") == "array":
            names.append(f"list of {_kind(option.get('items', {}), schemas)}")
        else:
            names.append(str(option.get("type", "any")))
    return ", ".join(dict.fromkeys(names))


_WORDS = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "exclusiveMinimum": "more than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} entries",
    "pattern": "pattern {}",
}


def _limits(field: dict[str, Any]) -> str:
    found: list[str] = []
    for option in [field, *_options(field)]:
        inner = [option.get("additionalProperties"), option.get("items")]
        for part in [option, *(p for p in inner if isinstance(p, dict))]:
            found += [word.format(part[key]) for key, word in _WORDS.items() if key in part]
    return ", ".join(dict.fromkeys(found))


def markdown() -> str:
    """All tables, for ``docs/api.md``."""
    out = ["### Shared by all that generate", "", *_table(rows(Sampling)), ""]
    for title, kind in BODIES:
        own = rows(kind, common=not issubclass(kind, Sampling))
        if not own:
            continue
        out += [f"### `{title}`", ""]
        if issubclass(kind, Sampling):
            out += ["Beside the shared ones:", ""]
        out += [*_table(own), ""]
    return "\n".join(out).rstrip() + "\n"


def _table(entries: list[Row]) -> list[str]:
    lines = ["| parameter | support | type | meaning | limits | error code |", "|---|---|---|---|---|---|"]
    for row in entries:
        cells = (f"`{row.name}`", row.support, row.kind, row.meaning, row.limits, row.error)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines
