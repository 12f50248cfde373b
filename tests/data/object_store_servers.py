"""A server on loopback that fails in the ways of real ones, for the tests of data/."""

import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROBE = (0, 1)


class FaultyServer:
    """Serves `content` at any path.

    faults: what goes wrong with the next requests that are no probe (a range of one byte), one each: "503" or another
    status; "page" (another file, whole), "truncate" and "stall" (half of the body, then the end or nothing), "reset"
    (half of the body, then RST), "shifted" (the range after the one asked for), None (nothing). probe_faults: those
    of probes. spans: (first byte, one after the last) of each request, None without a range; seen: its headers. gate:
    requests with a number (from 0, probes not counted) of `gate_from` and above wait until it is set.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.etag = '"version-1"'
        self.last_modified = None
        self.ranges = True
        self.headers = {}
        self.error = b""  # the body of a "503" or another status
        self.faults: deque[str | None] = deque()
        self.probe_faults: deque[str | None] = deque()
        self.spans: list[tuple[int, int] | None] = []
        self.seen: list[dict[str, str]] = []
        self.gate = threading.Event()
        self.gate_from = 10**9
        self.on_request: Callable[[int], None] = lambda number: None
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"faulty": self}))
        self.httpd.daemon_threads = True
        self.httpd.handle_error = lambda *_: None  # clients that are killed, or give up, are no news
        threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.httpd.server_address[1]}"
        self.url = f"{self.endpoint}/bucket/file.bin"

    @property
    def part_spans(self) -> list[tuple[int, int]]:
        """The ranges asked for, probes left out."""
        return [span for span in self.spans if span not in (None, PROBE)]

    def close(self) -> None:
        self.closing.set()
        self.gate.set()
        self.httpd.shutdown()
        self.httpd.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faulty: FaultyServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.faulty
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        span = (int(found[1]), int(found[2]) + 1) if found else None
        with server.lock:
            number = sum(span != PROBE for span in server.spans)
            if span != PROBE:
                server.on_request(number)
            server.spans.append(span)
            server.seen.append({name.lower(): value for name, value in self.headers.items()})
            queue = server.probe_faults if span == PROBE else server.faults
            fault = queue.popleft() if queue else None
            content = server.content
            etag = server.etag
        if span != PROBE and number >= server.gate_from:
            server.gate.wait(120)  # seconds; a broken test fails then, and does not hang
        if fault and fault.isdecimal():
            return self.answer(int(fault), server.error, server.headers)
        if fault == "page":
            return self.answer(200, b"<html>Sign in</html>", {})
        headers = dict(server.headers)
        headers |= {"ETag": etag} if etag else {}
        headers |= {"Last-Modified": server.last_modified} if server.last_modified else {}
        if span is None or not server.ranges:
            return self.answer(200, content, headers, fault)
        start = span[0]
        stop = min(span[1], len(content))
        if fault == "shifted":
            start = start + 1
            stop = min(stop + 1, len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self.answer(206, content[start:stop], headers, fault)

    def answer(self, status: int, body: bytes, headers: dict[str, str], fault: str | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = fault in ("truncate", "stall", "reset")
        try:
            self.wfile.write(body[: len(body) // 2] if self.close_connection else body)
            self.wfile.flush()
        except OSError:  # the client has gone
            self.close_connection = True
            return
        if fault == "stall":
            self.faulty.closing.wait()
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
