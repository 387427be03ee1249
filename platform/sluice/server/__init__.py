"""The ASGI server: Daphne's, with back-pressure, limits and a drain."""
