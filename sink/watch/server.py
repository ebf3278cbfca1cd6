"""Serves a run's state over HTTP: the page, its data, metrics for Prometheus, and health.

The job must not notice it, whatever is sent here:

- Python's own `http.server` with a thread for each of at most `MOST_CONNECTIONS` connections. `PROBES` more are asked
  for what they want, and get health only: idle clients must not make an orchestrator end the job. All others are told
  to come back later. A library would bring keep-alive, bodies, routing and its own threads, all of which are limited
  away here.
- A connection has one request. Its head must come within `REQUEST_SECONDS` and `MOST_HEAD` bytes, its body isn't read,
  and its answer must be taken within `ANSWER_SECONDS`.
- `GET` and `HEAD` only, and nothing that is asked changes anything. Answers are made once for all who ask within
  `KEPT_SECONDS`.
- A browser must not be led here by a foreign page: `Host` has to be an address, a name without a dot, or a name that
  the configuration gives (DNS rebinding needs a name of the attacker's own), and no answer allows other origins to read
  it.
"""

import contextlib
import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from io import BytesIO
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import generate_latest

from sink.errors import ConfigError
from sink.watch.metrics import registry
from sink.watch.state import State

log = logging.getLogger("rowdelta")

MOST_CONNECTIONS = 32
PROBES = 8
"""Connections above `MOST_CONNECTIONS`, which get health only."""
PROBE_SECONDS = 0.5
"""Within which the head of their requests must come. A probe sends it at once."""
MOST_HEAD = 16 * 1024
REQUEST_SECONDS = 5.0
ANSWER_SECONDS = 20.0
KEPT_SECONDS = 2.0
"""An answer about all tables may take a tenth of a second of a core."""
_STOP_SECONDS = 0.1
"""Until it sees that it has to stop."""

_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_HEALTH = ("/healthz", "/healthz/live", "/healthz/ready")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\n\r\n"

Answer = tuple[int, str, bytes]
"""Status, content type, body."""


class WatchServer:
    """A server in threads of its own, from `start` to `stop`.

    :param host: an address, or a name of this machine.
    :param names: what `Host` may say besides addresses and names without a dot.
    :raises ConfigError: the address can't be used.
    """

    def __init__(self, state: State, host: str, port: int, names: Collection[str] = ()) -> None:
        self._answers = _Answers(state)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET

        class Server(_Server):
            address_family = family

        try:
            self._server = Server((host, port), self._answers, {name.lower() for name in (*names, host)})
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"sink.http: can't listen at {_shown(host, port)}: {reason}. Does another process, perhaps another "
                "sink, listen there? Name an address of this machine and a free port, or leave sink.http out."
            ) from None
        self._host = host
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_STOP_SECONDS,), name="rowdelta-http", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()
        if not is_loopback(self._host):
            log.warning(
                "sink.http: %s can be reached from other machines, without a password: whoever can, sees the names, "
                "positions and errors of all tables.",
                _shown(self._host, self.port),
            )
        log.info("watch this run at http://%s/", _shown(self._host, self.port))

    def stop(self) -> None:
        """Stop listening. Answers that are being sent end with their threads."""
        self._server.shutdown()
        self._server.server_close()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Answers:
    """What is answered to a path."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._registry = registry(state)
        folder = resources.files("sink.watch") / "page"
        self._page = {path: (kind, (folder / name).read_bytes()) for path, (name, kind) in _PAGE.items()}
        self._metrics = _Kept(lambda: generate_latest(self._registry))
        self._summary = _Kept(lambda: _json(state.summary()))

    def answer(self, path: str, query: str) -> Answer:
        if path in self._page:
            return (200, *self._page[path])
        match path:
            case "/metrics":
                return 200, _METRICS, self._metrics.get()
            case "/state.json":
                return 200, _JSON, self._summary.get()
            case "/table.json":
                return self._table(query)
            case _ if path in _HEALTH:
                return self._health(path)
        return 404, _TEXT, b"There is /, /metrics, /healthz, /healthz/live and /healthz/ready.\n"

    def _table(self, query: str) -> Answer:
        number = parse_qs(query).get("number", [""])[0]
        found = self._state.table(int(number)) if number.isascii() and number.isdigit() and len(number) < 9 else None
        return (404, _TEXT, b"no such table\n") if found is None else (200, _JSON, _json(found))

    def _health(self, path: str) -> Answer:
        dead, unready = self._state.live(), self._state.not_ready()
        asked = {"live": dead is None, "ready": not unready}
        problems = [*([dead] if dead else []), *unready]
        if path != "/healthz":
            name = path.rpartition("/")[2]
            asked = {name: asked[name]}
            problems = [dead] if dead and name == "live" else unready if name == "ready" else []
        return 200 if all(asked.values()) else 503, _JSON, _json({**asked, "problems": problems})


class _Kept:
    """An answer that is made again when it is asked for and older than `KEPT_SECONDS`."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._turn = threading.Lock()
        self._made: tuple[float, bytes] | None = None

    def get(self) -> bytes:
        with self._turn:
            if self._made is None or time.monotonic() - self._made[0] > KEPT_SECONDS:
                body = self._make()
                self._made = time.monotonic(), body
            return self._made[1]


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], answers: _Answers, names: Collection[str]) -> None:
        self.answers = answers
        self.names = names
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._free_for_probes = threading.BoundedSemaphore(PROBES)
        self._probes: set[Any] = set()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # that of `HTTPServer` looks the machine's name up, for which it may wait long
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            if not self._free_for_probes.acquire(blocking=False):
                # what fits into the socket's buffer isn't waited for
                request.setblocking(False)
                with contextlib.suppress(OSError):
                    request.send(_BUSY)
                self.shutdown_request(request)
                return
            self._probes.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._release(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._release(request)

    def is_probe(self, request: Any) -> bool:
        """Whether only health may be asked for, because too many others are connected."""
        return request in self._probes

    def _release(self, request: Any) -> None:
        if request in self._probes:
            self._probes.remove(request)
            self._free_for_probes.release()
        else:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, and whatever else: nobody waits for it."""
        log.debug("sink.http: a request failed", exc_info=True)


class _TooMuchError(Exception):
    """The head of a request is too long."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "rowdelta"
    sys_version = ""
    protocol_version = "HTTP/1.0"  # the connection ends with the answer

    def setup(self) -> None:
        self.connection = self.request
        self._is_probe = self.server.is_probe(self.request)
        self.wfile = _Writer(self.connection)  # type: ignore[assignment]
        self.rfile = BytesIO()

    def handle(self) -> None:
        try:
            self.rfile = BytesIO(_head(self.connection, PROBE_SECONDS if self._is_probe else REQUEST_SECONDS))
        except _TooMuchError:
            self.requestline, self.command, self.request_version = "", "GET", "HTTP/1.0"
            self._send(431, _TEXT, b"The head of the request is too long.\n")
            return
        self.handle_one_request()

    def finish(self) -> None:
        """There is nothing to flush."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if self._is_probe and path not in _HEALTH:
            self.wfile.write(_BUSY)
            return
        if not self._is_expected_host():
            self._send(
                421, _TEXT, b"This name isn't known here. Use the address, or add the name to sink.http.hosts.\n"
            )
            return
        self._send(*self.server.answers.answer(path, query))

    do_HEAD = do_GET  # noqa: N815 - `http.server` looks for this name

    def _is_expected_host(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        if not hosts:
            return True  # no browser leaves it out
        try:
            name = (urlsplit(f"//{hosts[0].strip()}").hostname or "").rstrip(".").lower()
        except ValueError:
            return False
        if len(hosts) > 1 or not name:
            return False
        return ":" in name or "." not in name or name in self.server.names or _is_address(name)

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.request_version = "HTTP/1.0"  # without headers, as in 0.9, no answer is safe
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What `http.server` calls for a request that it can't read, or a method that isn't here. What was sent isn't
        repeated.
        """
        status = 405 if code == 501 else code
        if status == 405:
            self._send(status, _TEXT, b"GET and HEAD only.\n")
        else:
            self.command = "GET"
            self._send(status, _TEXT, b"not a request that is understood here\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not in the job's log."""


class _Writer:
    """Sends, all of an answer within `ANSWER_SECONDS`, however slowly it is taken."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._end: float | None = None

    def write(self, data: bytes) -> None:
        if self._end is None:
            self._end = time.monotonic() + ANSWER_SECONDS
        self._connection.settimeout(max(0.001, self._end - time.monotonic()))
        self._connection.sendall(data)

    def flush(self) -> None:
        """Nothing is kept back."""


def _head(connection: socket.socket, seconds: float) -> bytes:
    """The request up to the empty line.

    :param seconds: within which it must come.
    :raises OSError: it doesn't come in time, or the client has gone.
    """
    end = time.monotonic() + seconds
    received = bytearray()
    while b"\r\n\r\n" not in received and b"\n\n" not in received:
        if len(received) > MOST_HEAD:
            raise _TooMuchError
        connection.settimeout(max(0.001, end - time.monotonic()))
        more = connection.recv(4096)
        if not more:
            raise ConnectionError("the client has gone")
        received += more
    return bytes(received)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
