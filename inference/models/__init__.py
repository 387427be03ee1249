"""Where models come from: the configured targets and the default model."""
