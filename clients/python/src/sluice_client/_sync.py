"""The same without ``async``: the client runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from sluice_client._async import AsyncClient, AsyncGeneration
from sluice_client._result import Result

T = TypeVar("T")


class Generation:
    """One answer on its way; see :class:`sluice_client.AsyncGeneration`."""

    def __init__(self, client: Client, inner: AsyncGeneration) -> None:
        self._client = client
        self._inner = inner

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = self._client._run(self._next())
        if piece is None:
            raise StopIteration
        return piece

    async def _next(self) -> str | None:
        # StopAsyncIteration can not leave a coroutine.
        return await anext(self._inner, None)

    @property
    def request_id(self) -> str | None:
        return self._inner.request_id

    @property
    def position(self) -> int | None:
        return self._inner.position

    @property
    def result(self) -> Result | None:
        return self._inner.result

    def wait(self) -> Result:
        """Read to the end; raises as :meth:`sluice_client.AsyncGeneration.wait`."""
        return self._client._run(self._inner.wait())

    def cancel(self) -> None:
        """End it; harmless when it has ended."""
        self._client._run(self._inner.cancel())


class Client:
    """As :class:`sluice_client.AsyncClient`; may be used from several threads."""

    def __init__(self, url: str, key: str, *, patience: float = 30.0) -> None:
        self._inner = AsyncClient(url, key, patience=patience)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sluice client", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._inner.__aenter__())
        except BaseException:  # also Ctrl-C: the thread ends with what it was started for
            self._stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket and end the thread."""
        if self._thread.is_alive():
            self._run(self._inner.close())
            self._stop()

    def generate(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        model: str | None = None,
        resumable: bool = True,
        **fields: Any,
    ) -> Generation:
        """Start a generation; see :meth:`sluice_client.AsyncClient.generate`."""
        inner = self._run(
            self._inner.generate(prompt=prompt, messages=messages, model=model, resumable=resumable, **fields)
        )
        return Generation(self, inner)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
