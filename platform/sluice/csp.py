"""The Content-Security-Policy of every Django page: own files only, nothing inline, no frames."""

from __future__ import annotations

from inspect import iscoroutinefunction

from django.utils.decorators import sync_and_async_middleware

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)


@sync_and_async_middleware
def content_security_policy(get_response):
    """Middleware that sets the header where a view has not set its own."""
    if iscoroutinefunction(get_response):

        async def middleware(request):
            response = await get_response(request)
            response.headers.setdefault("Content-Security-Policy", POLICY)
            return response

    else:

        def middleware(request):
            response = get_response(request)
            response.headers.setdefault("Content-Security-Policy", POLICY)
            return response

    return middleware
