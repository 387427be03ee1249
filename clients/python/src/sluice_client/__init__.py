"""A client for Sluice's WebSocket: typed, sync and async, resuming by itself."""

from sluice_client._async import AsyncClient, AsyncGeneration
from sluice_client._errors import ConnectionLost, GenerationError, SluiceClientError
from sluice_client._result import Result
from sluice_client._sync import Client, Generation

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "Client",
    "ConnectionLost",
    "Generation",
    "GenerationError",
    "Result",
    "SluiceClientError",
]
