"""The in-flight pages, inside Django's admin: its login, its permissions, its look.

Nothing here reads a table of requests, because there is none: each view asks the
process's gateway. The views are synchronous, as the admin is; what they ask
runs on the server's own event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any

from asgiref.sync import async_to_sync
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from apps.inflight import owners, panels, services
from apps.inflight.models import InflightRequest
from apps.inflight.query import AGES, PHASES, Query
from apps.inflight.roster import Source, matching_ids, select, source
from apps.inflight.rows import COLUMNS, NUMBERS, row
from inference.errors import SluiceError
from sluice.readonly import ReadOnlyAdmin

LIVE_URL = "/inflight/live"
SHOWN_IDS = 20

Handler = Callable[..., HttpResponse]


def guarded(permission: str) -> Callable[[Handler], Handler]:
    """A view that needs a permission; one clear page where the request store does not answer."""

    def decorate(view: Handler) -> Handler:
        @wraps(view)
        def wrapped(self: InflightAdmin, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            if not request.user.has_perm(permission):  # type: ignore[union-attr]
                raise PermissionDenied
            try:
                return view(self, request, *args, **kwargs)
            except SluiceError as exc:
                return self.page(request, "unavailable", "Not available", problem=str(exc), status=503)

        return wrapped

    return decorate


@admin.register(InflightRequest)
class InflightAdmin(ReadOnlyAdmin):
    """Requests, workers and servers, endings, health; and the way to stop a request."""

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("inflight.view_inflight")  # type: ignore[union-attr]

    def get_urls(self) -> list[URLPattern]:
        wrap = self.admin_site.admin_view
        name = "inflight_inflightrequest"
        return [
            path("", wrap(require_safe(self.changelist_view)), name=f"{name}_changelist"),
            path("cancel/", wrap(require_POST(self.cancel_view)), name=f"{name}_cancel"),
            path("workers/", wrap(require_safe(self.workers_view)), name=f"{name}_workers"),
            path("command/", wrap(require_POST(self.command_view)), name=f"{name}_command"),
            path("endings/", wrap(require_safe(self.endings_view)), name=f"{name}_endings"),
            path(
                "health/", wrap(require_http_methods(["GET", "HEAD", "POST"])(self.health_view)), name=f"{name}_health"
            ),
            path("request/<str:object_id>/text/", wrap(require_POST(self.text_view)), name=f"{name}_text"),
            path("request/<str:object_id>/", wrap(require_safe(self.request_view)), name=f"{name}_change"),
        ]

    # --- requests ---------------------------------------------------------------------

    @guarded("inflight.view_inflight")
    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        query = Query.parse(request.GET)
        gateway = source()
        selection, choices = async_to_sync(_page_data)(gateway, query)
        names = owners.names(v.owner for v in selection.items)
        rows = [_shown(v.id, row(v, names.get(v.owner, "")), selection.now_ms) for v in selection.items]
        blank = [{"name": n, "heading": h, "number": n in NUMBERS} for n, h, _ in COLUMNS]
        return self.page(
            request, "requests", "Requests in flight",
            query=query, rows=rows, columns=_columns(query), blank=blank, selection=selection, choices=choices,
            phases=PHASES, ages=AGES, live_url=f"{LIVE_URL}?{query.encode()}", keep=query.encode(),
            previous=query.with_page(selection.page - 1).encode(),
            following=query.with_page(selection.page + 1).encode(),
            may_cancel=request.user.has_perm("inflight.cancel_request"),  # type: ignore[union-attr]
        )  # fmt: skip

    @guarded("inflight.view_inflight")
    def request_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """One request while it lives; its summary while the history remembers it."""
        object_id = unquote(object_id)
        view, ending, details, now_ms = async_to_sync(_one)(source(), object_id)
        found = view or ending
        name = owners.names([found.owner])[found.owner] if found else ""
        shown = _shown(object_id, row(view, name), now_ms) if view else None
        job, claims = details or (None, [])
        events = panels.timeline(view, ending, claims) if found else []
        return self.page(
            request, "request", f"Request {object_id}"[:120],
            object_id=object_id, shown=shown, ending=ending, owner=name, timeline=events,
            parameters=panels.parameters(job, ending), facts=panels.facts(ending) if ending else [],
            live_url=f"{LIVE_URL}?{Query(id=object_id).encode()}" if view else "",
            may_read=view is not None and request.user.has_perm("inflight.view_text"),  # type: ignore[union-attr]
            may_cancel=request.user.has_perm("inflight.cancel_request"),  # type: ignore[union-attr]
            status=200 if found else 404,
        )  # fmt: skip

    @guarded("inflight.view_text")
    def text_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Prompt and answer, for those who may; a POST, so that no link or reload looks by accident."""
        object_id = unquote(object_id)
        found = async_to_sync(services.read_text)(request.user, source(), object_id)
        return self.page(
            request, "text", f"Text of {object_id}"[:120], found=found, object_id=object_id,
            status=200 if found else 404,
        )  # fmt: skip

    @guarded("inflight.cancel_request")
    def cancel_view(self, request: HttpRequest) -> HttpResponse:
        """Asks first; with ``confirmed``, cancels and goes back to the list."""
        gateway = source()
        keep = request.POST.get("keep", "")
        every = "all" in request.POST
        if every:
            ids = async_to_sync(matching_ids)(gateway, Query.parse(QueryDict(keep)))
        else:
            ids = list(dict.fromkeys(request.POST.getlist("id")))
        back = f"{reverse('admin:inflight_inflightrequest_changelist')}?{keep}"
        if not ids:
            self.message_user(request, "Nothing to cancel: no request is selected or matches.", messages.WARNING)
            return HttpResponseRedirect(back)
        if request.POST.get("confirmed") != "yes":
            return self.page(
                request, "cancel", "Cancel requests?" if every or len(ids) > 1 else "Cancel this request?",
                ids=ids, first=ids[:SHOWN_IDS], more=max(0, len(ids) - SHOWN_IDS), every=every, keep=keep,
                back=back, filters=Query.parse(QueryDict(keep)).describe(), max_reason=services.MAX_REASON,
            )  # fmt: skip
        reason = request.POST.get("reason", "")
        done, gone = async_to_sync(services.cancel_requests)(request.user, gateway, ids, reason)
        level = messages.SUCCESS if done else messages.WARNING
        self.message_user(request, f"{len(done)} cancelled, {len(gone)} had ended before.", level)
        return HttpResponseRedirect(back)

    # --- processes, history, health -----------------------------------------------------

    @guarded("inflight.view_inflight")
    def workers_view(self, request: HttpRequest) -> HttpResponse:
        tables = async_to_sync(panels.processes)(source())
        return self.page(
            request, "workers", "Workers and servers",
            may_drain=request.user.has_perm("inflight.drain_server"),  # type: ignore[union-attr]
            **tables,
        )  # fmt: skip

    @guarded("inflight.drain_server")
    def command_view(self, request: HttpRequest) -> HttpResponse:
        """An order to one worker or server, after a question."""
        kind, target, verb = (request.POST.get(n, "") for n in ("kind", "target", "verb"))
        services.check_command(kind, verb)
        back = reverse("admin:inflight_inflightrequest_workers")
        if request.POST.get("confirmed") != "yes":
            return self.page(
                request, "command", f"{verb.capitalize()} {kind} {target}?"[:120],
                kind=kind, target=target, verb=verb, explained=services.explain(kind, verb), back=back,
            )  # fmt: skip
        heard = async_to_sync(services.command)(request.user, source(), kind, target, verb)
        if heard:
            self.message_user(request, f"The {kind} {target} was told to {verb}.", messages.SUCCESS)
        else:
            self.message_user(request, f"No {kind} {target} is there to hear it.", messages.ERROR)
        return HttpResponseRedirect(back)

    @guarded("inflight.view_inflight")
    def endings_view(self, request: HttpRequest) -> HttpResponse:
        data = async_to_sync(panels.endings)(source(), request.GET.get("outcome", "")[:40])
        names = owners.names(line["ending"].owner for line in data["lines"])
        for line in data["lines"]:
            line["owner"] = names[line["ending"].owner]
        return self.page(request, "endings", "Recent endings", **data)

    @guarded("inflight.view_inflight")
    def health_view(self, request: HttpRequest) -> HttpResponse:
        """The last audits; POST runs another."""
        data = async_to_sync(panels.health)(source(), request.method == "POST")
        if request.method == "POST":
            return HttpResponseRedirect(reverse("admin:inflight_inflightrequest_health"))
        return self.page(request, "health", "Health", **data)

    # --- parts --------------------------------------------------------------------------

    def page(self, request: HttpRequest, name: str, title: str, *, status: int = 200, **context: Any) -> HttpResponse:
        base = {**self.admin_site.each_context(request), "title": title, "opts": self.opts, "tab": name}
        return TemplateResponse(request, f"inflight/{name}.html", {**base, **context}, status=status)


def _columns(query: Query) -> list[dict[str, Any]]:
    current = query.sort.removeprefix("-")
    descending = query.sort.startswith("-")
    columns = []
    for name, heading, sort in COLUMNS:
        order = ("descending" if descending else "ascending") if sort and sort == current else ""
        link = query.with_sort(sort).encode() if sort else ""
        columns.append(
            {"name": name, "heading": heading, "sort": sort, "link": link, "order": order, "number": name in NUMBERS}
        )
    return columns


def _shown(request_id: str, cells: Any, now_ms: int) -> dict[str, Any]:
    parts = [
        {"name": n, "heading": h, "cell": cells[n], "text": cells[n].shown(now_ms), "number": n in NUMBERS}
        for n, h, _ in COLUMNS
    ]
    return {"id": request_id, "parts": parts}


async def _page_data(gateway: Source, query: Query) -> tuple[Any, dict[str, list[str]]]:
    """The page, and what the filters offer: what is alive, plus what is chosen."""
    selection = await select(gateway, query)
    workers, servers = await asyncio.gather(gateway.workers(), gateway.servers())
    models = {m.alias for w in workers for m in w.models}
    choices = {
        "model": sorted(models | {v.model for v in selection.items} | ({query.model} - {""})),
        "worker": sorted({w.id for w in workers} | ({query.worker} - {""})),
        "server": sorted({s.id for s in servers} | ({query.server} - {""})),
    }
    return selection, choices


async def _one(gateway: Source, request_id: str) -> tuple[Any, Any, Any, int]:
    now_ms = await gateway.now_ms()
    view = await gateway.view(request_id)
    if view is not None:
        return view, None, await gateway.details(request_id), now_ms
    history = await gateway.history(panels.HISTORY)
    return None, next((e for e in history if e.id == request_id), None), None, now_ms
