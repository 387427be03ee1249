"""The default engine: transformers' continuous batching behind our per-request sampler."""

import os

# Read once, when torch loads its OpenMP library: threads that wait for work sleep instead of
# spinning on cores that the event loop, the server and Redis need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from inference.engine.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine"]
