"""``POST /v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, Literal

from apps.api.schema.base import Body, about

MAX_INPUTS = 2048


class EmbeddingBody(Body, kw_only=True):
    """``POST /v1/embeddings``."""

    model: Annotated[str, about("Alias of a served model that makes embeddings.", min_length=1, max_length=256)]
    input: Annotated[
        str | list[str | int | list[int]],
        about(
            f"A text, texts, token ids, or lists of token ids: at most {MAX_INPUTS}, each within the model's context, "
            "none empty. Token ids are taken as they are; texts get the model's special tokens."
        ),
    ]
    encoding_format: (
        Annotated[Literal["float", "base64"], about("Default float; base64 holds float32, little-endian.")] | None
    ) = None
    dimensions: (
        Annotated[
            int,
            about(
                "Only the first so many components, normalised again; at most the model's own number. Good vectors "
                "come out where the model was trained for it.",
                ge=1,
                le=65536,
            ),
        ]
        | None
    ) = None
    priority: Annotated[Literal["low", "normal", "high"], about("Place in the queue.")] | None = None
    timeout: (
        Annotated[
            float, about("Seconds until all vectors are there; at most the operator's limit.", gt=0.0, le=86400.0)
        ]
        | None
    ) = None
    user: Annotated[str, about("Accepted without effect.", max_length=1024)] | None = None
