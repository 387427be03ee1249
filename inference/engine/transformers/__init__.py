"""The default engine: transformers' continuous batching behind our per-request sampler."""

from inference.engine.transformers.engine import TransformersEngine

__all__ = ["TransformersEngine"]
