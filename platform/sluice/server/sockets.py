"""Socket options that Daphne leaves alone."""

from __future__ import annotations

import contextlib
import socket

#: Unsent bytes that the kernel takes before it calls a connection not writable. Small, so that
#: a slow reader's backlog stays in the token log instead of in memory; acknowledged data in
#: flight is not limited by it.
NOTSENT_LOWAT = 128 * 1024
BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Raises:
        OSError: the port is taken, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server(
        (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=family == socket.AF_INET6 and host == "::"
    )
    sock.setblocking(False)
    return sock


def tune(sock: socket.socket, dead_peer_timeout: float) -> None:
    """Find dead peers: give up on a connection whose sent bytes stay unacknowledged for so many seconds."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError, AttributeError):  # each is Linux's name for it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(dead_peer_timeout / 2)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(dead_peer_timeout / 6)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(dead_peer_timeout * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_NOTSENT_LOWAT", 25), NOTSENT_LOWAT)


def has_unread(sock: socket.socket) -> bool:
    """Whether the peer has sent something that nobody has read yet."""
    try:
        return bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False
