"""A proxy that counts what a client asks of a server: requests and bytes, by operation."""

import http.client
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.stack.proxy import read_body

_OF_CONNECTION = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}


@dataclass(frozen=True)
class Request:
    """A request and its answer. `sent` and `received` are bytes of the bodies, as the client sees them."""

    method: str
    path: str
    query: dict[str, str]
    sent: int = 0
    received: int = 0
    status: int = 0
    client: int = 0
    """The client's port."""


def s3_operation(request: Request) -> str:
    """What the request is in S3's API, as bills count it."""
    query, method = request.query, request.method
    match method:
        case "GET" if request.path.count("/") == 1 or "list-type" in query or "prefix" in query:
            return "List"
        case "GET" | "HEAD" | "DELETE":
            return method.title()
        case "POST" if "delete" in query:
            return "DeleteObjects"
        case "POST" if "uploads" in query:
            return "CreateMultipartUpload"
        case "POST" if "uploadId" in query:
            return "CompleteMultipartUpload"
        case "PUT" if "uploadId" in query:
            return "UploadPart"
    return method.title()


def catalog_operation(request: Request) -> str:
    """What the request is in the Iceberg REST API, by method and kind of resource."""
    path = re.sub(r"(namespaces|tables|views)/[^/]+", r"\1/{}", request.path.removeprefix("/v1"))
    return f"{request.method} {path}"


class CountingProxy:
    """Passes requests on 127.0.0.1 on to a server on this machine.

    The header `Host` stays as the client sent it, and so does a signature that covers it.
    """

    def __init__(self, server: str) -> None:
        """:param server: URL of the server, without a path."""
        self.before: Callable[[Request], None] | None = None
        """Called before a request is passed on. It may take its time, and other requests go on meanwhile."""
        self.requests: list[Request] = []
        self.server = server
        self._target = urlsplit(server)
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def connect(self) -> http.client.HTTPConnection:
        assert self._target.hostname is not None
        return http.client.HTTPConnection(self._target.hostname, self._target.port, timeout=120)

    def note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)

    def take(self) -> list[Request]:
        """The requests since the last call."""
        with self._lock:
            taken, self.requests = self.requests, []
        return taken


def counted(requests: list[Request], operation: Callable[[Request], str]) -> dict[str, int]:
    """Number of requests by operation, the most frequent first."""
    return dict(Counter(map(operation, requests)).most_common())


@contextmanager
def counting(server: str) -> Iterator[CountingProxy]:
    proxy = CountingProxy(server)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


class _Handler(BaseHTTPRequestHandler):
    """One thread for each of the client's connections, with a connection of its own to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: CountingProxy
    _upstream: http.client.HTTPConnection | None = None

    def _pass_on(self) -> None:
        split = urlsplit(self.path)
        query = dict(parse_qsl(split.query, keep_blank_values=True))
        request = Request(self.command, unquote(split.path), query, client=self.client_address[1])
        body = read_body(self)
        if self.owner.before is not None:
            self.owner.before(request)
        answer, content = self._asked(body)
        self.owner.note(replace(request, sent=len(body), received=len(content), status=answer.status))
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _OF_CONNECTION and not (name.lower() == "content-length" and self.command != "HEAD"):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _asked(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        for attempt in range(2):
            if self._upstream is None:
                self._upstream = self.owner.connect()
            try:
                self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in _OF_CONNECTION | {"expect", "content-length"}:
                        self._upstream.putheader(name, value)
                if body or self.command in ("PUT", "POST"):
                    self._upstream.putheader("Content-Length", str(len(body)))
                self._upstream.endheaders(body or None)
                answer = self._upstream.getresponse()
                return answer, answer.read()
            except (http.client.HTTPException, ConnectionError):
                self._upstream.close()
                self._upstream = None
                if attempt:  # the server may have closed an idle connection; a new one fails for another reason
                    raise
        raise AssertionError("unreachable")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815

    def handle(self) -> None:
        with suppress(ConnectionError):  # clients drop connections as they please
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        pass
