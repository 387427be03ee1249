#!/usr/bin/env python
"""Sluice's command line. ``manage.py help`` lists the commands, ``manage.py CMD --help`` explains one."""

import os
import signal
import sys


def main():
    if sys.argv[1:2] and sys.argv[1] in ("up", "serve", "runworker"):
        # Until these have handlers of their own, while Django is imported, Ctrl-C ends them without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.version_info < (3, 11):  # noqa: UP036 - an old Python gets to read this
        sys.exit("Sluice needs Python 3.11 or newer; this is Python %d.%d." % sys.version_info[:2])  # noqa: UP031
    root = os.path.dirname(os.path.abspath(__file__))
    # platform/ is a plain folder that holds the project's package; as a package it would hide
    # the standard library's module of that name.
    for folder in (os.path.join(root, "platform"), root):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sluice.settings")
    try:
        from django.conf import settings
        from django.core.exceptions import ImproperlyConfigured
        from django.core.management import execute_from_command_line
    except ImportError:
        sys.exit("Django is not installed for this Python; run 'make install' and use .venv/bin/python.")
    from inference.errors import SluiceError

    try:
        settings.DEBUG  # noqa: B018 - reads the settings now: Django would report a bad one as "unknown command"
        execute_from_command_line(sys.argv)
    except (SluiceError, ImproperlyConfigured) as exc:
        if "--traceback" in sys.argv:
            raise
        sys.exit(f"error: {exc}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
