"""Engines: one interface (``base``), one module or folder per alternative."""
