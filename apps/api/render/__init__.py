"""Answers as bytes: one module per wire format, used for streams and plain bodies alike."""
