"""The public API: what clients send, what they get back, and how both travel."""
