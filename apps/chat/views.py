"""The chat page and its JSON: lists, details, changes, exports. Answers stream over the socket."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import wraps
from typing import Any

import msgspec
from asgiref.sync import async_to_sync
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.utils.http import content_disposition_header
from django.views.decorators.csrf import ensure_csrf_cookie
from django.views.decorators.http import require_http_methods, require_safe

from apps.chat import news, services, writing
from apps.chat.models import Conversation, Preset
from apps.chat.serialise import conversation_json, detail_json, export_json, export_markdown
from apps.chat.services import ChatError, Missing
from inference.errors import SluiceError
from inference.lifecycle import Reason
from sluice import runtime

PAGE = 60
"""Conversations in one part of the list."""

View = Callable[..., HttpResponse]


def json_view(view: View) -> View:
    """For the page's own calls: 401 instead of a login page, and errors as JSON."""

    @wraps(view)
    def wrapped(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if not request.user.is_authenticated:
            return _error("You have been signed out.", "unauthorised", 401)
        try:
            response = view(request, *args, **kwargs)
        except ChatError as exc:
            response = _error(str(exc), exc.code, exc.status)
        response.headers["Cache-Control"] = "no-store"
        return response

    return wrapped


def _error(message: str, code: str, status: int) -> JsonResponse:
    return JsonResponse({"error": {"message": message, "code": code}}, status=status)


def _body(request: HttpRequest) -> dict[str, Any]:
    try:
        # Stricter than Python's own: no NaN, and no halves of characters, which no database takes.
        body = msgspec.json.decode(request.body or b"{}")
    except (msgspec.DecodeError, RecursionError):
        raise ChatError("The body is not JSON.") from None
    if not isinstance(body, dict):
        raise ChatError("The body must be a JSON object.")
    return body


@login_required
@ensure_csrf_cookie
@require_safe
def page(request: HttpRequest, conversation_id: Any = None) -> HttpResponse:
    """The chat page; with an id, on that conversation."""
    detail = None
    if conversation_id is not None:
        found = Conversation.objects.for_user(request.user).filter(id=conversation_id).first()
        if found is None:
            return render(request, "chat/missing.html", status=404)
        # The page was perhaps just reloaded in mid-answer: its socket is on its way.
        writing.hold(found.id)
        detail = detail_json(found)
    boot = {"list": _list(request, "", 0), "detail": detail, "presets": _presets(request.user)}
    response = render(request, "chat/chat.html", {"boot": boot})
    response.headers["Cache-Control"] = "no-store"
    return response


@require_http_methods(["GET", "POST"])
@json_view
def conversations(request: HttpRequest) -> HttpResponse:
    """GET: a part of the list (``q``, ``offset``). POST: a new, empty conversation."""
    if request.method == "POST":
        created = services.create_conversation(request.user, _body(request).get("settings"))
        return JsonResponse(detail_json(created), status=201)
    try:
        offset = min(max(int(request.GET.get("offset", "0")), 0), 1_000_000)
    except ValueError:
        raise ChatError("offset must be a whole number.") from None
    return JsonResponse(_list(request, request.GET.get("q", "")[:200].replace("\x00", ""), offset))


def _list(request: HttpRequest, query: str, offset: int) -> dict[str, Any]:
    found = Conversation.objects.for_user(request.user).filter(leaf__isnull=False).matching(query).listed()
    rows = list(found[offset : offset + PAGE + 1])
    return {"conversations": [conversation_json(row) for row in rows[:PAGE]], "more": len(rows) > PAGE}


@require_http_methods(["GET", "PATCH", "DELETE"])
@json_view
def conversation(request: HttpRequest, conversation_id: Any) -> HttpResponse:
    """GET: with its messages. PATCH: title, pinned, settings, leaf. DELETE: with everything in it."""
    if request.method == "PATCH":
        changes = _body(request)
        changed = services.update_conversation(request.user, conversation_id, changes)
        if changes.keys() != {"leaf"}:  # another branch is turned to by one page, and the others read on
            _tell_pages(request, conversation_id)
        return JsonResponse(detail_json(changed))
    found = services.get_conversation(request.user, conversation_id)
    if request.method == "DELETE":
        _stop_all(found)
        found.delete()
        _tell_pages(request, conversation_id)
        return JsonResponse({"deleted": str(conversation_id)})
    return JsonResponse(detail_json(found))


def _stop_all(found: Conversation) -> None:
    """End what is still being written; a deleted answer has no reader."""
    for message in writing.streaming_answers(found):
        if message.request_id:
            try:
                async_to_sync(runtime.gateway().cancel)(message.request_id, Reason.USER)
            except SluiceError:
                # Its recorder finds no row to save to; the request ends at its own end.
                continue


def _tell_pages(request: HttpRequest, conversation_id: Any) -> None:
    """Let the user's other pages know; the one that asks says which it is."""

    async def tell() -> None:
        news.tell(request.user.pk, str(conversation_id), None, but=request.headers.get("X-Chat-Page", ""))

    async_to_sync(tell)()


@require_safe
@json_view
def export(request: HttpRequest, conversation_id: Any, kind: str) -> HttpResponse:
    """The conversation as a file: ``md`` (the shown branch) or ``json`` (everything)."""
    found = services.get_conversation(request.user, conversation_id)
    if kind == "json":
        text, mime = json.dumps(export_json(found), ensure_ascii=False, indent=2) + "\n", "application/json"
    elif kind == "md":
        text, mime = export_markdown(found), "text/markdown"
    else:
        raise Missing("export format")
    response = HttpResponse(text, content_type=f"{mime}; charset=utf-8")
    response.headers["Content-Disposition"] = content_disposition_header(True, f"{_file_name(found.title)}.{kind}")
    return response


def _file_name(title: str) -> str:
    """The words of a title, in whatever script."""
    kept = []
    for character in unicodedata.normalize("NFC", title.lower()):
        category = unicodedata.category(character)
        if category != "Cf":  # marks of direction and the like, within words
            kept.append(character if category[0] in "LMN" else " ")
    return "-".join("".join(kept).split())[:60].strip("-") or "chat"


def _presets(user: Any) -> list[dict[str, Any]]:
    found = Preset.objects.filter(user=user)
    return [{"id": preset.id, "name": preset.name, "settings": preset.settings} for preset in found]


@require_http_methods(["GET", "POST"])
@json_view
def presets(request: HttpRequest) -> HttpResponse:
    if request.method == "POST":
        body = _body(request)
        services.save_preset(request.user, body.get("name"), body.get("settings", {}))
    return JsonResponse({"presets": _presets(request.user)})


@require_http_methods(["DELETE"])
@json_view
def preset(request: HttpRequest, preset_id: int) -> HttpResponse:
    services.delete_preset(request.user, preset_id)
    return JsonResponse({"presets": _presets(request.user)})
