"""Measures links from inside a cluster lab: rank 0 swaps bytes with every other rank in turn.

Prints, on rank 0, one JSON object: address of the peer -> [Mbit/s to rank 0, Mbit/s back], of the
last rank at that address.
"""

import json
import os
import socket
import sys
import time
from contextlib import suppress


def serve(where: tuple[str, int], peers: int, nbytes: int) -> dict[str, tuple[float, float]]:
    """Rates of all peers, measured one after the other so that they do not share the link."""
    rates = {}
    with socket.create_server(where, backlog=peers) as server:
        for _ in range(peers):
            connection, (address, _) = server.accept()
            with connection:
                started = time.perf_counter()
                connection.sendall(b"g")
                receive(connection, nbytes)
                turned = time.perf_counter()
                send(connection, nbytes)
                receive(connection, 1)
                ended = time.perf_counter()
            mbit = nbytes * 8e-6
            rates[address] = (mbit / (turned - started), mbit / (ended - turned))
    return rates


def answer(where: tuple[str, int], nbytes: int) -> None:
    """The other side of `serve`: waits for its turn, sends, receives, confirms."""
    with connect(where) as connection:
        receive(connection, 1)
        send(connection, nbytes)
        receive(connection, nbytes)
        connection.sendall(b"d")


def connect(where: tuple[str, int]) -> socket.socket:
    """Waits up to 10 s for the server to listen."""
    for _ in range(100):
        with suppress(ConnectionRefusedError):
            return socket.create_connection(where)
        time.sleep(0.1)
    raise ConnectionRefusedError(f"nobody listens at {where}")


def send(connection: socket.socket, nbytes: int) -> None:
    """Sends that many zeros."""
    block = memoryview(bytes(1 << 20))
    for start in range(0, nbytes, len(block)):
        connection.sendall(block[: nbytes - start])


def receive(connection: socket.socket, nbytes: int) -> None:
    """Receives and drops that many bytes."""
    while nbytes:
        got = len(connection.recv(min(nbytes, 1 << 20)))
        if not got:
            raise ConnectionResetError("the peer hung up")
        nbytes -= got


def main() -> None:
    """The only argument is the number of bytes per direction."""
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    nbytes = int(sys.argv[1])
    if os.environ["RANK"] == "0":
        print(json.dumps(serve(where, int(os.environ["WORLD_SIZE"]) - 1, nbytes)))
    else:
        answer(where, nbytes)


if __name__ == "__main__":
    main()
