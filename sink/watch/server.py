"""Serves a run's state over HTTP: the page, its data, metrics for Prometheus, and health.

The job must not notice it, whatever is sent here:

- waitress accepts, reads and sends in one thread, whatever clients do, and makes answers in `_THREADS` more. It closes
  a connection on which nothing happens for `IDLE_SECONDS`, and reads no longer heads than `MOST_HEAD`.
- `GET` and `HEAD` only, and nothing that is asked changes anything. Answers are made once for all who ask within
  `KEPT_SECONDS`.
- A browser must not be led here by a foreign page: `Host` has to be an address, a name without a dot, or a name that
  the configuration gives (DNS rebinding needs a name of the attacker's own), and no answer allows other origins to read
  it.
"""

import ipaddress
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from http import HTTPStatus
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import generate_latest
from waitress import wasyncore
from waitress.server import create_server

from sink.errors import ConfigError
from sink.watch.metrics import registry
from sink.watch.state import State

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

log = logging.getLogger("rowdelta")

MOST_CONNECTIONS = 100
MOST_HEAD = 16 * 1024
IDLE_SECONDS = 5
KEPT_SECONDS = 2.0
"""An answer about all tables may take a tenth of a second of a core."""
_THREADS = 4

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

Answer = tuple[int, str, bytes]
"""Status, content type, body."""


class WatchServer:
    """A server in threads of its own, from `start` to `stop`.

    :param host: an address, or a name of this machine.
    :param names: what `Host` may say besides addresses and names without a dot.
    :raises ConfigError: the address can't be used.
    """

    def __init__(self, state: State, host: str, port: int, names: Collection[str] = ()) -> None:
        self._app = _App(state, {name.lower() for name in (*names, host)})
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen()  # only now no other process can have this port
        except (OSError, OverflowError) as error:
            self._socket.close()
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"sink.http: can't listen at {_shown(host, port)}: {reason}. Does another process, perhaps another "
                "sink, listen there? Name an address of this machine and a free port, or leave sink.http out."
            ) from None
        self._host = host
        self._connections: dict[int, Any] = {}
        self.port = int(self._socket.getsockname()[1])

    def start(self) -> None:
        logging.getLogger("waitress").setLevel(logging.ERROR)  # requests are not in the job's log
        self._server = create_server(
            self._app,
            map=self._connections,
            sockets=[self._socket],
            threads=_THREADS,
            ident="rowdelta",
            connection_limit=MOST_CONNECTIONS,
            max_request_header_size=MOST_HEAD,
            max_request_body_size=1024,
            channel_timeout=IDLE_SECONDS,
            cleanup_interval=1,
            log_socket_errors=False,
            asyncore_use_poll=True,  # `select` takes no file descriptor above 1023
        )
        self._thread = threading.Thread(target=self._server.run, name="rowdelta-http", daemon=True)
        self._thread.start()
        if not is_loopback(self._host):
            log.warning(
                "sink.http: %s can be reached from other machines, without a password: whoever can, sees the names, "
                "positions and errors of all tables.",
                _shown(self._host, self.port),
            )
        log.info("watch this run at http://%s/", _shown(self._host, self.port))

    def stop(self) -> None:
        """Stop listening, and close all connections."""
        self._server.task_dispatcher.shutdown()
        # by the thread that waits for them
        self._server.trigger.pull_trigger(lambda: wasyncore.close_all(self._connections, ignore_all=True))
        self._thread.join()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _App:
    """What is answered to a request: a WSGI application."""

    def __init__(self, state: State, names: Collection[str]) -> None:
        self._state = state
        self._names = names
        self._registry = registry(state)
        folder = resources.files("sink.watch") / "page"
        self._page = {path: (kind, (folder / name).read_bytes()) for path, (name, kind) in _PAGE.items()}
        self._metrics = _Kept(lambda: generate_latest(self._registry))
        self._summary = _Kept(lambda: _json(state.summary()))

    def __call__(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        status, kind, body = self._answer(environ)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}
        start_response(f"{status} {HTTPStatus(status).phrase}", list(headers.items()))
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    def _answer(self, environ: "WSGIEnvironment") -> Answer:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return 405, _TEXT, b"GET and HEAD only.\n"
        if not self._is_expected(environ.get("HTTP_HOST")):
            return 421, _TEXT, b"This name isn't known here. Use the address, or add the name to sink.http.hosts.\n"
        path = environ["PATH_INFO"]
        if path in self._page:
            return (200, *self._page[path])
        match path:
            case "/metrics":
                return 200, _METRICS, self._metrics.get()
            case "/state.json":
                return 200, _JSON, self._summary.get()
            case "/table.json":
                return self._table(environ["QUERY_STRING"])
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

    def _is_expected(self, host: str | None) -> bool:
        if host is None:
            return True  # no browser leaves it out
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
        except ValueError:
            return False
        if "," in host or not name:  # several of them come with a comma
            return False
        return ":" in name or "." not in name or name in self._names or _is_address(name)


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


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
