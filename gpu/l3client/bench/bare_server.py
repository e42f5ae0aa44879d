"""The other end of the bare sockets: run as a process of its own, ``bare_server.py BYTES FOLDER``.

One thread for each connection, and nothing but system calls on memory that is there already. A request is an operation
(G send from memory, P receive into memory, F receive and write to a new file), an offset and a length; P and F are
answered by one byte. It imports nothing of ours, so that it holds nothing but its memory.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import threading

REQUEST = struct.Struct("<cQQ")
_FILE_CHUNK = 1 << 20
"""Received and written at once; with 256 KiB or all 2 MiB it was no faster."""


def serve(connection: socket.socket, memory: memoryview, folder: str) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(_FILE_CHUNK))
    while head := connection.recv(REQUEST.size, socket.MSG_WAITALL):
        operation, offset, length = REQUEST.unpack(head)
        if operation == b"G":
            connection.sendall(memory[offset : offset + length])
            continue
        if operation == b"P":
            receive(connection, memory[offset : offset + length])
        else:
            file = os.open(f"{folder}/{offset}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            while length:
                part = buffer[: min(length, _FILE_CHUNK)]
                receive(connection, part)
                length -= os.write(file, part)
            os.close(file)
        connection.sendall(b".")


def receive(connection: socket.socket, into: memoryview) -> None:
    got = 0
    while got < len(into):
        count = connection.recv_into(into[got:])
        if not count:
            raise ConnectionError("closed in the middle")
        got += count


def main() -> None:
    size, folder = int(sys.argv[1]), sys.argv[2]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    memory = memoryview(mmap.mmap(-1, size, flags=flags))
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection, memory, folder), daemon=True).start()


if __name__ == "__main__":
    main()
