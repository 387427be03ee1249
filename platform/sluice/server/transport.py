"""Client connections that send at once what a stream writes."""

from __future__ import annotations

from typing import Any

from twisted.internet import tcp


class Transport(tcp.Server):
    """Twisted's connection, whose writes wait for the event loop's next round, but for streams.

    Registering for "can be written" and waiting for it costs several times what sending a token
    costs, and a connection that streams is nearly always free to be written. So while ``prompt``
    is set, what is written goes straight to the socket; what the socket does not take waits for
    it as ever. Everything else is better off waiting: headers and body then leave together.
    """

    prompt = False

    def startWriting(self) -> None:
        # With something unsent the socket is full, and the event loop waits for it already.
        if self.prompt and not self.dataBuffer and not self.disconnecting:
            failed = self.doWrite() is not None
            # Errors come again, and are dealt with, when the event loop tries.
            if not failed and not self.dataBuffer:
                return
        super().startWriting()

    def loseConnection(self, *args: Any) -> None:
        # Twisted asks to write here, and only then notes that it is to close once all is written. Written
        # at once, that would be forgotten: the connection would stay open for good.
        self.prompt = False
        super().loseConnection(*args)

    def loseWriteConnection(self) -> None:
        self.prompt = False
        super().loseWriteConnection()
