"""The typed bodies of every endpoint: validation, OpenAPI and the parameter table come from them."""
