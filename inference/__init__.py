"""Sluice's core: messages, request store, dispatch, workers and engines.

Nothing in this package imports Django; the Django project builds a
:class:`inference.config.Config` and passes it in.
"""
