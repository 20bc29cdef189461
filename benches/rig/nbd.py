"""A small NBD client: handshake with GO, READ, WRITE and FLUSH one at a time, DISC.

It exists because fio's nbd engine ends without a flush whatever `end_fsync` says (seen with 3.33),
and a sequential write is not over before it. Source of all constants: the NBD protocol
specification, doc/proto.md of https://github.com/NetworkBlockDevice/nbd.
"""

import socket
import struct
import urllib.parse

NBD_MAGIC = b"NBDMAGIC"
OPTION_MAGIC = b"IHAVEOPT"
REPLY_MAGIC = 0x3E889045565A9
REQUEST_MAGIC = 0x25609513
SIMPLE_REPLY_MAGIC = 0x67446698
OPTION_GO = 7
REPLY_ACK = 1
COMMAND_READ = 0
COMMAND_WRITE = 1
COMMAND_DISC = 2
COMMAND_FLUSH = 3
ANSWER_SECONDS_MAX = 600  # Chosen by hand: a flush of all data that the kernel keeps dirty.


class Client:
    """One connection to one export. `uri` is nbd://host:port/name or nbd+unix:///name?socket=path."""

    def __init__(self, uri):
        parts = urllib.parse.urlsplit(uri)
        name = urllib.parse.unquote(parts.path[1:]).encode()
        if parts.scheme == "nbd+unix":
            path = urllib.parse.parse_qs(parts.query)["socket"][0]
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(ANSWER_SECONDS_MAX)
            self.socket.connect(path)
        else:
            address = (parts.hostname, parts.port or 10809)
            self.socket = socket.create_connection(address, ANSWER_SECONDS_MAX)
        if self._receive(16) != NBD_MAGIC + OPTION_MAGIC:
            raise ConnectionError(f"{uri}: not a fixed newstyle NBD server")
        self._receive(2)
        self.socket.sendall(struct.pack(">I", 3))  # fixed newstyle, no zeroes
        body = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
        self.socket.sendall(OPTION_MAGIC + struct.pack(">II", OPTION_GO, len(body)) + body)
        while True:
            magic, _option, kind, length = struct.unpack(">QIII", self._receive(20))
            payload = self._receive(length)
            if magic != REPLY_MAGIC or kind & 0x80000000:
                raise ConnectionError(f"{uri}: refused: {payload.decode(errors='replace')}")
            if kind == REPLY_ACK:
                return
            if struct.unpack(">H", payload[:2])[0] == 0:
                self.size_bytes = struct.unpack(">Q", payload[2:10])[0]

    def _receive(self, length):
        data = b""
        while len(data) < length:
            part = self.socket.recv(length - len(data))
            if not part:
                raise ConnectionError("the NBD server closed the connection")
            data += part
        return data

    def _request(self, command, offset=0, length=0, payload=b""):
        head = struct.pack(">IHHQQI", REQUEST_MAGIC, 0, command, 1, offset, length)
        self.socket.sendall(head + payload)
        magic, error, _cookie = struct.unpack(">IIQ", self._receive(16))
        if magic != SIMPLE_REPLY_MAGIC or error:
            raise ConnectionError(f"request {command} failed: magic {magic:#x}, error {error}")

    def flush(self):
        """Returns when all writes answered before are on stable storage."""
        self._request(COMMAND_FLUSH)

    def write(self, offset, data):
        """Returns when the write is answered."""
        self._request(COMMAND_WRITE, offset, len(data), data)

    def read(self, offset, length):
        """Returns the bytes there."""
        self._request(COMMAND_READ, offset, length)
        return self._receive(length)

    def close(self):
        self.socket.sendall(struct.pack(">IHHQQI", REQUEST_MAGIC, 0, COMMAND_DISC, 2, 0, 0))
        self.socket.close()


def flush(uri):
    """Flushes an export over a connection of its own."""
    client = Client(uri)
    client.flush()
    client.close()


def size_bytes(uri):
    """Returns the size of an export, which also proves that the server answers."""
    client = Client(uri)
    client.close()
    return client.size_bytes
