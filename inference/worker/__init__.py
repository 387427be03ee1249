"""A worker: one process, one device, one engine per model it serves."""

from inference.worker.worker import Worker

__all__ = ["Worker"]
