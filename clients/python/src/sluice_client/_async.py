"""The client proper: one socket, many generations, reconnecting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from sluice_client._errors import ConnectionLost, GenerationError
from sluice_client._result import Result

PATH = "/ws/v1/stream"
PROTOCOL = "sluice.v1"
#: Handshakes that no repetition will turn into a success.
FINAL = frozenset({400, 401, 403, 404})
FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0
#: Close code: a message was too big.
TOO_BIG = 1009


def _encoded(message: Mapping[str, Any]) -> str:
    """A message as strict JSON that can be written as UTF-8; else ValueError."""
    text = json.dumps(message, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def _said(exc: InvalidStatus) -> str:
    """The message in the body of a refused handshake."""
    try:
        return str(json.loads(exc.response.body or b"")["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return exc.response.reason_phrase


class AsyncGeneration:
    """One answer on its way: iterate over it for its text, piece by piece.

    Attributes:
        request_id: the server's id, once it has accepted.
        position: place in the queue while it waits, 0 first, else ``None``.
        result: set when the iteration has ended.
    """

    def __init__(self, client: AsyncClient, ref: str, message: dict[str, Any]) -> None:
        self._client = client
        self._ref = ref
        self._message = message
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._text: list[str] = []
        self._last = 0
        self._error: Exception | None = None
        self.request_id: str | None = None
        self.position: int | None = None
        self.result: Result | None = None

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        piece = await self._queue.get()
        if piece is not None:
            return piece
        self._queue.put_nowait(None)  # a second look finds the end as well
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def wait(self) -> Result:
        """Read to the end.

        Raises:
            GenerationError: refused, or not completed.
            ConnectionLost: the connection could not be made again.
        """
        async for _ in self:
            pass
        assert self.result is not None
        return self.result

    async def cancel(self) -> None:
        """End it; harmless when it has ended."""
        if self.result is None and self._error is None:
            await self._client._tell({"type": "cancel", "id": self._ref})

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "accepted":
            self.request_id = message["request_id"]
        elif kind == "queued":
            self.position = message["position"]
        elif kind == "delta":
            self.position = None
            if message["seq"] > self._last:
                self._last = message["seq"]
                self._text.append(message["text"])
                self._queue.put_nowait(message["text"])
        elif kind == "done":
            self.result = Result(
                "".join(self._text),
                message["finish_reason"],
                message.get("stop_reason"),
                message.get("usage", {}),
                message.get("timings", {}),
            )
            self._end(None)
        elif kind == "error":
            code = message.get("error", {}).get("code")
            # The server leaves: read on elsewhere.
            if code in ("detached", "shutting_down") and self.request_id is not None:
                self._client._reattach_later(self._ref)
            else:
                self._end(GenerationError(message))

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self._client._open.pop(self._ref, None)
        self._queue.put_nowait(None)

    def _again(self) -> dict[str, Any]:
        """What to say on a new connection so that this one goes on."""
        if self.request_id is None:
            return self._message
        return {"type": "attach", "id": self._ref, "request_id": self.request_id, "after": self._last}


class AsyncClient:
    """A connection to a server, made again whenever it is lost.

    Args:
        url: of the server, ``http://`` or ``https://``.
        key: an API key.
        patience: seconds for which a lost connection is tried again.
    """

    def __init__(self, url: str, key: str, *, patience: float = 30.0) -> None:
        scheme, _, rest = url.rstrip("/").partition("://")
        self._url = {"http": "ws", "https": "wss"}.get(scheme, scheme) + "://" + rest + PATH
        self._key = key
        self._patience = patience
        self._open: dict[str, AsyncGeneration] = {}
        self._count = 0
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._later: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._socket = await self._connect()
        self._reader = asyncio.create_task(self._read(), name="sluice reader")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the socket. Generations that still run are left to the server's grace time."""
        tasks = [task for task in (self._reader, *self._later) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            await self._socket.close()
        self._fail(ConnectionLost("The client has been closed."))

    async def generate(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        model: str | None = None,
        resumable: bool = True,
        **fields: Any,
    ) -> AsyncGeneration:
        """Start a generation; any field of ``POST /generate`` may be given.

        Args:
            resumable: survive a lost connection.

        Raises:
            ConnectionLost: there is no connection, and none can be made.
            ValueError: a field can not be sent as JSON (NaN, half a surrogate pair).
        """
        self._count += 1
        ref = f"g{self._count}"
        given = {"prompt": prompt, "messages": messages, "model": model, **fields}
        message = {name: value for name, value in given.items() if value is not None}
        message |= {"type": "generate", "id": ref, "resumable": resumable}
        _encoded(message)
        generation = AsyncGeneration(self, ref, message)
        if self._reader is None or self._reader.done():
            raise ConnectionLost("The client is not connected.")
        self._open[ref] = generation
        await self._tell(message)
        return generation

    async def _tell(self, message: dict[str, Any]) -> None:
        # On a dead connection the reader repeats what matters once there is a new one.
        if self._socket is not None:
            with contextlib.suppress(ConnectionClosed):
                await self._socket.send(_encoded(message))

    async def _connect(self) -> ClientConnection:
        try:
            return await connect(
                self._url,
                additional_headers={"Authorization": f"Bearer {self._key}"},
                subprotocols=[PROTOCOL],  # type: ignore[list-item]
                max_size=None,
            )
        except InvalidStatus as exc:
            status = exc.response.status_code
            if status in FINAL:
                raise ConnectionLost(f"The server does not let this client in ({status}): {_said(exc)}") from exc
            raise

    async def _read(self) -> None:
        """Read for as long as there is somebody to read from."""
        try:
            while True:
                assert self._socket is not None
                try:
                    async for raw in self._socket:
                        message = json.loads(raw)
                        generation = self._open.get(message.get("id"))
                        if generation is not None:
                            generation._hear(message)
                except ConnectionClosed as exc:
                    if exc.rcvd is not None and exc.rcvd.code == TOO_BIG:
                        self._give_up_the_longest()
                await self._reconnect()
        except ConnectionLost as exc:
            self._fail(exc)

    async def _reconnect(self) -> None:
        loop = asyncio.get_running_loop()
        deadline, delay = loop.time() + self._patience, FIRST_DELAY
        while True:
            try:
                self._socket = await self._connect()
                break
            except (OSError, InvalidHandshake, TimeoutError) as exc:
                if loop.time() + delay > deadline:
                    raise ConnectionLost(f"The server can not be reached: {exc}") from exc
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(LONGEST_DELAY, delay * 2)
        for generation in list(self._open.values()):
            if generation.request_id is not None and not generation._message["resumable"]:
                generation._end(ConnectionLost("The connection was lost, and this generation is not resumable."))
            else:
                await self._tell(generation._again())

    def _reattach_later(self, ref: str) -> None:
        """The server has let go of one stream while the socket is still there."""

        async def attach() -> None:
            await asyncio.sleep(FIRST_DELAY)
            generation = self._open.get(ref)
            if generation is not None:
                await self._tell(generation._again())

        task = asyncio.create_task(attach(), name=f"sluice attach {ref}")
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def _give_up_the_longest(self) -> None:
        """The server closed because of the size of a message: sent again it would close again."""
        waiting = [generation for generation in self._open.values() if generation.request_id is None]
        if waiting:
            error = {"message": "The message is larger than the server takes.", "code": "message_too_big"}
            longest = max(waiting, key=lambda generation: len(_encoded(generation._message)))
            longest._end(GenerationError({"status": 413, "error": error}))

    def _fail(self, error: Exception) -> None:
        for generation in list(self._open.values()):
            generation._end(error)
