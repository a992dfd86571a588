"""A RAS service of NCCL in a thread of the test: the protocol of src/ras/client_support.cc in NCCL 2.24 to 2.32."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SILENT = "a process that is stopped"
Reply = Callable[[], str]


def _converse(connection: socket.socket, reply: str, has_json: bool, seen: list[str]) -> None:
    with connection, connection.makefile("rwb", buffering=0) as stream:
        for line in stream:
            command = line.decode().strip().lower()
            seen.append(command)
            if reply == SILENT:
                continue
            if command.startswith("client protocol "):
                stream.write(b"SERVER PROTOCOL 2\n")
            elif command.startswith("timeout ") or (command.startswith("set format ") and has_json):
                stream.write(b"OK\n")
            elif command in ("status", "verbose status"):
                stream.write(reply.encode())
                return
            else:
                stream.write(f"ERROR: Unknown command {command}\n".encode())


@contextmanager
def serve(*replies: str | Reply, has_json: bool = True) -> Iterator[tuple[str, list[str]]]:
    """Reply to each connection with the next of these, then with the last one; give the address, and the commands."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[str] = []

    def accept() -> None:
        left = [*replies]
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            reply = left.pop(0) if len(left) > 1 else left[0]
            text = reply if isinstance(reply, str) else reply()
            threading.Thread(target=_converse, args=(connection, text, has_json, seen), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
