"""KV blocks over TCP, for hosts that share only a network: the owner listens, and peers that have its offer read.

Host memory only. Both sides prove that they know the offer's secret before any byte of a region is sent; the bytes
themselves are not encrypted. Closing the socket ends a transfer, whether the peer died, was too slow, or the transfer
was cancelled; memory is no longer written after that.

    owner -> reader   challenge (32 bytes)
    reader -> owner   proof of it, challenge (32 bytes each)
    owner -> reader   proof of it (32 bytes)
    reader -> owner   length (4 bytes), reads [(region, offset, size), ...] as msgpack
    owner -> reader   their bytes, in that order
"""

import contextlib
import ctypes
import fcntl
import hmac
import ipaddress
import logging
import math
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from threading import Event, Lock, Thread
from typing import Annotated

import msgspec

from engine.transfer.base import (
    NotFromHere,
    Offer,
    Read,
    Recent,
    Region,
    TransferError,
    check_cancelled,
    check_remote,
    decode_offer,
    split_reads,
)

CHALLENGE = 32
MAX_REQUEST = 16 << 20
CONNECT_SECONDS = 1.0
PROOF_SECONDS = 2.0
"""Time limit for both proofs of a new connection."""
STALL_SECONDS = 5.0
"""Silence after which a connection is given up."""
LOOK_SECONDS = 0.05
"""Interval of checks for cancellation."""
PIECE = 4 << 20
MOST_CONNECTIONS = 64
"""Maximum number of authenticated connections."""
MOST_STRANGERS = 64
"""Maximum number of unauthenticated connections; a further one replaces the oldest."""
_SIOCGIFADDR = 0x8915

logger = logging.getLogger(__name__)


class _TcpOwner(msgspec.Struct, frozen=True, array_like=True):
    """Content of an offer."""

    addresses: tuple[str, ...]
    """Numeric IP addresses; never resolved by DNS."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    secret: bytes
    sizes: tuple[int, ...]


class Tcp:
    """The method for host memory of any host.

    Listens on `port`; 0 takes a free one. Raises TransferError for regions that are not host memory, and OSError if the
    port cannot be used.
    """

    def __init__(self, regions: Sequence[Region], port: int = 0) -> None:
        if any(region.device >= 0 for region in regions):
            raise TransferError("the KV cache is in a GPU's memory")
        self._regions = regions
        self._views = [_view(region) for region in regions]
        self._server = _RegionServer(self._views, port)
        owner = _TcpOwner(
            _addresses(), self._server.port, self._server.secret, tuple(region.size for region in regions)
        )
        self.offer = Offer("tcp", msgspec.msgpack.encode(owner))
        self._reached: Recent[bytes, str] = Recent()
        """Address at which a peer was last reached, by the peer's secret."""

    def read(self, data: bytes, reads: Sequence[Read], cancelled: Event) -> None:
        owner = decode_offer(data, _TcpOwner)
        check_remote(reads, owner.sizes)
        with self._connect(owner, cancelled) as connection:
            try:
                request = msgspec.msgpack.encode(
                    [_Wanted(read.region, read.remote_offset, read.size) for read in reads]
                )
                connection.sendall(struct.pack(">I", len(request)) + request)
                for read in reads:
                    _receive(
                        connection,
                        self._views[read.region][read.local_offset : read.local_offset + read.size],
                        cancelled,
                    )
            except OSError as error:
                raise TransferError(f"the peer's connection ended: {error}") from error

    def close(self) -> None:
        self._server.close()

    def _connect(self, owner: _TcpOwner, cancelled: Event) -> socket.socket:
        """Connect to a peer. Raises NotFromHere if none of its addresses works."""
        best = self._reached.get(owner.secret)
        reasons = []
        for address in sorted(owner.addresses, key=lambda address: address != best):
            check_cancelled(cancelled)
            try:
                connection = _reach(address, owner, cancelled)
            except (OSError, ValueError) as error:
                reasons.append(f"{address!r}: {error}")
                continue
            self._reached.put(owner.secret, address)
            return connection
        raise NotFromHere(
            f"the peer cannot be reached at port {owner.port} ({'; '.join(reasons) or 'it has no address'})"
        )


def _reach(address: str, owner: _TcpOwner, cancelled: Event) -> socket.socket:
    """Connect and authenticate. Raises OSError if the peer is not there, and ValueError for a malformed address."""
    ipaddress.ip_address(address)
    connection = socket.create_connection((address, owner.port), CONNECT_SECONDS)
    try:
        _set_timeouts(connection)
        _prove(connection, owner.secret, cancelled)
    except BaseException:
        connection.close()
        raise
    return connection


class _Wanted(msgspec.Struct, frozen=True, array_like=True):
    region: Annotated[int, msgspec.Meta(ge=0)]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    size: Annotated[int, msgspec.Meta(ge=0)]


class _RegionServer:
    """Serves reads of the views to those who know the secret, one thread a connection."""

    def __init__(self, views: Sequence[memoryview], port: int) -> None:
        self.secret = secrets.token_bytes(CHALLENGE)
        self._views = views
        self._lock = Lock()
        self._connections: dict[socket.socket, Thread] = {}
        self._strangers: list[socket.socket] = []
        self._peers: set[socket.socket] = set()
        self._closed = Event()
        try:
            self._listener = socket.create_server(("", port), backlog=MOST_CONNECTIONS)
        except OSError as error:
            raise OSError(f"port {port} cannot be listened on: {error.strerror}") from error
        self.port: int = self._listener.getsockname()[1]
        self._thread = Thread(target=self._accept, name="transfer-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Returns when no thread reads the regions any more."""
        with self._lock:
            self._closed.set()
            running = list(self._connections.items())
            for connection, _ in running:
                with contextlib.suppress(OSError):  # the peer may have closed it
                    connection.shutdown(socket.SHUT_RDWR)
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join()
        self._listener.close()
        for _, thread in running:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                logger.warning("a transfer's connection could not be accepted: %s", error)
                time.sleep(LOOK_SECONDS)
                continue
            thread = Thread(target=self._serve, args=(connection,), name="transfer-server", daemon=True)
            with self._lock:
                if self._closed.is_set():
                    connection.close()
                    return
                if len(self._strangers) >= MOST_STRANGERS:
                    with contextlib.suppress(OSError):  # it may have been closed already
                        self._strangers.pop(0).shutdown(socket.SHUT_RDWR)
                self._strangers.append(connection)
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            _set_timeouts(connection)
            _check_proof(connection, self.secret, self._closed)
            self._welcome(connection)
            (length,) = struct.unpack(">I", _exactly(connection, 4, self._closed))
            if length > MAX_REQUEST:
                raise ConnectionError("the request is too long")
            wanted = msgspec.msgpack.decode(_exactly(connection, length, self._closed), type=list[_Wanted])
            reads = [Read(one.region, one.offset, 0, one.size) for one in wanted]
            check_remote(reads, [view.nbytes for view in self._views])
            for read in split_reads(reads, PIECE):
                connection.sendall(self._views[read.region][read.remote_offset : read.remote_offset + read.size])
        except (OSError, msgspec.DecodeError, TransferError) as error:
            logger.info("a peer's read ended early: %s", error)
        finally:
            with self._lock:
                del self._connections[connection]
                self._peers.discard(connection)
                if connection in self._strangers:
                    self._strangers.remove(connection)
                connection.close()

    def _welcome(self, peer: socket.socket) -> None:
        """Count a connection as authenticated. Raises OSError if it was replaced meanwhile or there are too many."""
        with self._lock:
            if peer not in self._strangers or len(self._peers) >= MOST_CONNECTIONS:
                raise ConnectionError("too many connections")
            self._strangers.remove(peer)
            self._peers.add(peer)


def _prove(connection: socket.socket, secret: bytes, cancelled: Event) -> None:
    """Authenticate both sides, as the reader. Raises OSError if the other side does not know the secret."""
    deadline = time.monotonic() + PROOF_SECONDS
    theirs = _exactly(connection, CHALLENGE, cancelled, deadline)
    ours = secrets.token_bytes(CHALLENGE)
    connection.sendall(_proof(secret, b"reader", theirs) + ours)
    if not hmac.compare_digest(_exactly(connection, CHALLENGE, cancelled, deadline), _proof(secret, b"owner", ours)):
        raise ConnectionError("another process listens there")


def _check_proof(connection: socket.socket, secret: bytes, closed: Event) -> None:
    """Authenticate both sides, as the owner. Raises OSError if the other side does not know the secret."""
    ours = secrets.token_bytes(CHALLENGE)
    deadline = time.monotonic() + PROOF_SECONDS
    connection.sendall(ours)
    proof, theirs = (_exactly(connection, CHALLENGE, closed, deadline) for _ in range(2))
    if not hmac.compare_digest(proof, _proof(secret, b"reader", ours)):
        raise ConnectionError("the peer does not know the secret")
    connection.sendall(_proof(secret, b"owner", theirs))


def _proof(secret: bytes, role: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, role + challenge, "sha256")


def _exactly(connection: socket.socket, size: int, cancelled: Event, deadline: float = math.inf) -> bytes:
    buffer = bytearray(size)
    _receive(connection, memoryview(buffer), cancelled, deadline)
    return bytes(buffer)


def _receive(connection: socket.socket, into: memoryview, cancelled: Event, deadline: float = math.inf) -> None:
    """Fill `into`.

    Raises OSError if the connection ends, stalls for STALL_SECONDS or misses the deadline, TransferError if cancelled.
    """
    heard = time.monotonic()
    while into:
        check_cancelled(cancelled)
        if time.monotonic() > deadline:
            raise TimeoutError("no proof came in time")
        try:
            got = connection.recv_into(into[:PIECE], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            if time.monotonic() - heard > STALL_SECONDS:
                raise TimeoutError(f"nothing came for {STALL_SECONDS:.0f} s") from None
            continue
        if not got:
            raise ConnectionResetError("closed by the other side")
        into = into[got:]
        heard = time.monotonic()


def _set_timeouts(connection: socket.socket) -> None:
    """Set timeouts in the kernel.

    A call then waits there for a whole piece, and not in the interpreter for each packet.
    """
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(LOOK_SECONDS * 1e6)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(STALL_SECONDS), 0))


def _view(region: Region) -> memoryview:
    return memoryview((ctypes.c_char * region.size).from_address(region.address)).cast("B")


def _addresses() -> tuple[str, ...]:
    """Return this host's IPv4 addresses: first that of the default route, last the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = []
        with contextlib.suppress(OSError):  # there is no default route
            probe.connect(("192.0.2.1", 9))  # sends nothing
            found.append(probe.getsockname()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found.append(socket.inet_ntoa(answer[20:24]))
    return tuple(sorted(dict.fromkeys(found), key=lambda address: address.startswith("127.")))
