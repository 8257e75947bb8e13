"""A load test of ``examples/serve.py`` on the loopback address: statuses, latencies and the server's memory.

    python benchmarks/serving.py                     # trains for some seconds, then 2,000 requests from 16 clients

One request in five is malformed. The server must answer each with the status that its kind deserves, and its memory
must not grow. Needs the extras ``export`` and ``serve``.
"""

import argparse
import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

SERVE = Path(__file__).parents[1] / "examples" / "serve.py"
SECONDS = 60  # for the start, and for a request
ROW = [0.5] * 64
#: method, path, body and expected status of requests that are wrong
MALFORMED = {
    "not JSON": ("POST", "/predict", "hello", 400),
    "nested too deep": ("POST", "/predict", "[" * 100_000, 400),
    "not UTF-8": ("POST", "/predict", b"\xff\xfe\xfa", 400),
    "no inputs": ("POST", "/predict", json.dumps({"rows": [ROW]}), 422),
    "wrong shape": ("POST", "/predict", json.dumps({"inputs": [ROW[:-1]]}), 422),
    "one row without a list": ("POST", "/predict", json.dumps({"inputs": ROW}), 422),
    "ragged": ("POST", "/predict", json.dumps({"inputs": [ROW, ROW[:3]]}), 422),
    "words": ("POST", "/predict", json.dumps({"inputs": [["a"] * 64]}), 422),
    "truth values": ("POST", "/predict", json.dumps({"inputs": [[True] * 64]}), 422),
    "null": ("POST", "/predict", json.dumps({"inputs": None}), 422),
    "no rows": ("POST", "/predict", json.dumps({"inputs": []}), 422),
    "too many rows": ("POST", "/predict", json.dumps({"inputs": [ROW] * 257}), 422),
    "NaN": ("POST", "/predict", json.dumps({"inputs": [[float("nan"), *ROW[1:]]]}), 422),
    "infinite in single precision": ("POST", "/predict", json.dumps({"inputs": [[1e300, *ROW[1:]]]}), 422),
    "integer beyond 64 bits": ("POST", "/predict", json.dumps({"inputs": [[10**400, *ROW[1:]]]}), 422),
    "huge": ("POST", "/predict", " " * (2**20 + 1), 413),
    "unknown path": ("POST", "/nothing", "{}", 404),
    "wrong method": ("GET", "/predict", None, 405),
}


class Result(NamedTuple):
    """What came of a load test.

    :ivar seconds: of each good request.
    :ivar statuses: how often each status came.
    :ivar wrong: what was answered otherwise than expected.
    :ivar memory: the server's resident bytes after a quarter of the requests, and at the end.
    """

    seconds: list[float]
    statuses: Counter[int]
    wrong: list[str]
    memory: tuple[int, int]


@contextmanager
def server(folder: Path) -> Iterator[tuple[int, int]]:
    """A server of this folder: its port and its process id."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVE), "run", str(folder), "--port", str(port)])
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                    status, _ = ask(connection, "GET", "/health", None)
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        assert status == 200
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(timeout=SECONDS)


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: str | bytes | None) -> tuple[int, bytes]:
    connection.request(method, path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read()


def load(port: int, pid: int, requests: int = 2000, clients: int = 16) -> Result:
    """Sends requests from several clients, each one after the other."""
    seconds: list[float] = []
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    early: list[int] = []
    process, lock = psutil.Process(pid), threading.Lock()

    def client(number: int) -> None:
        rng = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        for _ in range(requests // clients):
            kind = rng.choice(list(MALFORMED)) if rng.random() < 0.2 else "good"
            good = json.dumps({"inputs": [[rng.random() for _ in range(64)] for _ in range(rng.choice((1, 1, 8)))]})
            method, path, body, expected = MALFORMED.get(kind, ("POST", "/predict", good, 200))
            start = time.perf_counter()
            status, content = ask(connection, method, path, body)
            taken = time.perf_counter() - start
            sentence = status == 200 or bool(json.loads(content)["detail"])
            with lock:
                statuses[status] += 1
                if kind == "good":
                    seconds.append(taken)
                if status != expected or not sentence:
                    wrong.append(f"{kind}: {status} {content[:100]!r}")
                if sum(statuses.values()) == requests // 4:
                    early.append(process.memory_info().rss)
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Result(seconds, statuses, wrong, (early[0], process.memory_info().rss))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(SERVE), "prepare", folder], check=True)
        with server(Path(folder)) as (port, pid):
            load(port, pid, options.requests // 4, 1)
            for clients in (1, options.clients):
                start = time.perf_counter()
                result = load(port, pid, options.requests, clients)
                total = time.perf_counter() - start
                cuts = [1e3 * cut for cut in statistics.quantiles(result.seconds, n=100)]
                print(f"{clients:2} clients: {sum(result.statuses.values()) / total:.0f} requests a second;", end=" ")
                print(f"median {cuts[49]:.1f} ms, p99 {cuts[98]:.1f} ms;", end=" ")
                print(f"statuses {dict(sorted(result.statuses.items()))}; unexpected {result.wrong};", end=" ")
                print("memory {:.1f} -> {:.1f} MB".format(*(value / 1e6 for value in result.memory)))


if __name__ == "__main__":
    main()
