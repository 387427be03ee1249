"""Which models a chat page offers its user, and which of them answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apps.api.sampling import chat_defaults
from apps.chat import services
from apps.chat.services import ChatError
from inference.errors import SluiceError
from inference.messages import ModelInfo
from sluice import runtime


def offered(principal: Any) -> dict[str, Any]:
    """Configured models that the caller may use, the served ones marked; the default is the first served."""
    try:
        gateway = runtime.gateway()
    except SluiceError:
        return {"models": [], "default": None}
    served = gateway.models()
    models = [
        {
            "alias": alias,
            "ready": alias in served,
            "context_length": served[alias].context_length if alias in served else None,
            "defaults": defaults(alias, served),
        }
        for alias in gateway.aliases
        if principal.may_use(alias) and (alias not in served or served[alias].kind == "generate")
    ]
    ready = [model["alias"] for model in models if model["ready"]] or [model["alias"] for model in models]
    return {"models": models, "default": ready[0] if ready else None}


def defaults(model: str, served: Mapping[str, ModelInfo]) -> dict[str, float]:
    """What a conversation samples with where its settings say nothing; of a model that is not served, a guess."""
    return chat_defaults(served[model].suggested if model in served else {})


def chosen(principal: Any, user: Any, body: dict[str, Any]) -> str:
    """The model of the conversation that ``body`` (a ``generate``) is about; where it has none, the default.

    Raises:
        ChatError: the caller may not use it, or no model at all.
    """
    settings: dict[str, Any] = {}
    if body.get("conversation"):
        settings = services.get_conversation(user, body["conversation"]).settings
    elif body.get("message"):
        settings = services.get_message(user, body["message"]).conversation.settings
    elif isinstance(body.get("settings"), dict):
        settings = body["settings"]
    model = settings.get("model")
    if isinstance(model, str) and model:
        if not principal.may_use(model):
            raise ChatError("Your account may not use this model.", "model_not_allowed")
        return model
    default = offered(principal)["default"]
    if not default:
        raise ChatError("No model is configured for your account.", "model_not_found")
    return str(default)
