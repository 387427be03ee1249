"""The admin page of what is in flight."""
