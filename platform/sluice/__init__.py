"""The Django project: settings, routing, the ASGI server and what every consumer builds on."""
