"""Client connections that send at once what a stream writes."""

from __future__ import annotations

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
        if self.prompt and not self.disconnecting:
            # Errors come again, and are dealt with, when the event loop tries.
            failed = self.doWrite() is not None
            if not failed and not self.dataBuffer:
                return
        super().startWriting()
