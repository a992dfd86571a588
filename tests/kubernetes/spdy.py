"""``kubectl exec`` over SPDY/3.1, which all versions of kubectl speak: streams for input, output and the exit code.

Frames are those of www.chromium.org/spdy/spdy-protocol/spdy-protocol-draft3-1; the streams those of Kubernetes'
v4.channel.k8s.io. Windows are not kept: no test prints that much.
"""

import json
import os
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from typing import IO

SYN_STREAM, SYN_REPLY, PING, WINDOW_UPDATE = 1, 2, 6, 9
FIN = 1

_NAMES = """
    options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow
    authorization cache-control connection content-base content-encoding content-language content-length
    content-location content-md5 content-range content-type date etag expect expires from host if-match
    if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma
    proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade
    user-agent vary via warning www-authenticate method get status
    """
_MORE = ("200 OK", "version", "HTTP/1.1", "url", "public", "set-cookie", "keep-alive", "origin")
_REST = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden"
    "404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable"
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT"
    "chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript,"
    "publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
_WORDS = [*_NAMES.split(), *_MORE]
DICTIONARY = b"".join(struct.pack(">I", len(each)) + each.encode() for each in _WORDS) + _REST.encode()
assert zlib.adler32(DICTIONARY) == 0xE3C6A7C2, "the dictionary of the draft"


class Connection:
    """The server's side of a connection."""

    def __init__(self, rfile: BufferedIOBase, wfile: BufferedIOBase) -> None:
        self._rfile, self._wfile = rfile, wfile
        self._lock = threading.Lock()
        self._inflate, self._deflate = zlib.decompressobj(zdict=DICTIONARY), zlib.compressobj(zdict=DICTIONARY)

    def read(self) -> tuple[int, int, int, bytes] | None:
        """Return type (0 for data), stream, flags and content of the next frame; None at the end."""
        head = self._rfile.read(8)
        if len(head) < 8:
            return None
        first, second = struct.unpack(">II", head)
        data, flags = self._rfile.read(second & 0xFFFFFF), second >> 24
        if not first >> 31:
            return 0, first, flags, data
        kind = first & 0xFFFF
        return kind, struct.unpack(">I", data[:4])[0] if len(data) >= 4 else 0, flags, data

    def headers(self, data: bytes) -> dict[str, str]:
        """Read the headers of a SYN_STREAM."""
        block, found, at = self._inflate.decompress(data[10:]), [], 4
        for _ in range(2 * struct.unpack(">I", block[:4])[0]):
            (size,) = struct.unpack(">I", block[at : at + 4])
            found.append(block[at + 4 : at + 4 + size].decode())
            at += 4 + size
        return dict(zip(found[::2], found[1::2], strict=True))

    def accept(self, stream: int) -> None:
        """Reply to a SYN_STREAM, without headers."""
        with self._lock:
            block = self._deflate.compress(struct.pack(">I", 0)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
            self._write(0x80030000 | SYN_REPLY, 0, struct.pack(">I", stream) + block)

    def pong(self, data: bytes) -> None:
        with self._lock:
            self._write(0x80030000 | PING, 0, data)

    def send(self, stream: int, data: bytes, flags: int = 0) -> None:
        with self._lock:
            self._write(stream, flags, data)

    def _write(self, first: int, flags: int, data: bytes) -> None:
        self._wfile.write(struct.pack(">II", first, flags << 24 | len(data)) + data)
        self._wfile.flush()


def serve_exec(
    handler: BaseHTTPRequestHandler, start: "Callable[..., subprocess.Popen[bytes]]", query: dict[str, list[str]]
) -> None:
    """Run a command in a container, with its streams on this connection."""
    handler.send_response(101)
    for name, value in (("Connection", "Upgrade"), ("Upgrade", "SPDY/3.1")):
        handler.send_header(name, value)
    handler.send_header("X-Stream-Protocol-Version", "v4.channel.k8s.io")
    handler.end_headers()
    handler.close_connection = True
    link, streams = Connection(handler.rfile, handler.wfile), dict[str, int]()
    wanted = {"error", *(name for name in ("stdin", "stdout", "stderr") if query.get(name) == ["true"])}
    while not wanted <= streams.keys():
        if (frame := link.read()) is None:
            return
        kind, stream, _, data = frame
        if kind == SYN_STREAM:
            streams[link.headers(data)["streamtype"]] = stream
            link.accept(stream)
        elif kind == PING:
            link.pong(data)
    pipes = {"stdin": subprocess.PIPE if "stdin" in streams else subprocess.DEVNULL}
    process = start(query["command"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **pipes)
    copies = [
        threading.Thread(target=_copy, args=[link, source, streams[name]])
        for name, source in (("stdout", process.stdout), ("stderr", process.stderr))
        if name in streams and source
    ]
    ending = threading.Thread(target=_end, args=[link, process, copies, streams["error"]])
    for thread in (*copies, ending):
        thread.start()
    while frame := link.read():
        kind, stream, flags, data = frame
        if kind == PING:
            link.pong(data)
        elif kind == SYN_STREAM:  # that of resizes, which nobody needs here
            link.headers(data)
            link.accept(stream)
        elif kind == 0 and stream == streams.get("stdin") and process.stdin and not process.stdin.closed:
            os.write(process.stdin.fileno(), data)
            if flags & FIN:
                process.stdin.close()
    process.kill()  # its client is gone
    ending.join()


def _copy(link: Connection, source: IO[bytes], stream: int) -> None:
    try:
        while data := os.read(source.fileno(), 1 << 14):
            link.send(stream, data)
        link.send(stream, b"", FIN)
    except OSError:  # the connection is gone
        source.read()


def _end(link: Connection, process: "subprocess.Popen[bytes]", copies: list[threading.Thread], stream: int) -> None:
    """Send how the command ended, after all that it printed."""
    for thread in copies:
        thread.join()
    code = process.wait()
    failed = {"reason": "NonZeroExitCode", "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]}}
    status = {"metadata": {}, "status": "Failure" if code else "Success", **(failed if code else {})}
    try:
        link.send(stream, json.dumps(status).encode(), FIN)
    except OSError:
        pass
