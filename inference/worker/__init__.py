"""A worker: one process, one device (or one group of them), one engine per model it serves."""
