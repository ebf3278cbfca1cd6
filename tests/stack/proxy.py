"""An HTTP server in front of another: what it asks for before it lets a request pass, and how it fails on request.

    with HttpProxy(catalog.uri) as proxy:
        proxy.add(Fault("POST", r"/tables/", status=502, after=True))  # the next commit is done, and answered by 502
        … proxy.url …

A fault holds for `times` requests, then the proxy is honest again. `BasicAuth` wants a user and a password. `OAuth2` is
a REST catalog's door: it gives tokens that expire, and adds credentials of the store to the tables that it loads.
"""

import base64
import json
import re
import secrets
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

_HOP_BY_HOP = {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
_ANSWERED = {"expect", "transfer-encoding"}
"""Headers with which a client asks how to send its body."""


@dataclass(frozen=True)
class Request:
    """`path` is as the client sent it, with the query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @classmethod
    def of_json(cls, status: int, value: object, **headers: str) -> "Answer":
        return cls(status, {"Content-Type": "application/json", **headers}, json.dumps(value).encode())


@dataclass(frozen=True)
class Fault:
    """What happens to requests of this method whose path the pattern is found in.

    :param method: a regular expression of all of it; the default is any.
    :param path: a regular expression of a part of path and query; the default is any.
    :param times: for how many requests.
    :param delay: seconds until the request goes on.
    :param status: the answer, instead of the server's.
    :param cut: the connection ends without an answer; if a number, after this many bytes of the answer's body.
    :param after: the server behind gets the request, and does it, before `status` or `cut`.
    :param upload: the connection ends after this many bytes of the request's body, without an answer.
    :param body: of the answer with `status`; by default what a REST catalog says.
    """

    method: str = ".*"
    path: str = ""
    times: int = 1
    delay: float = 0.0
    status: int | None = None
    cut: bool | int = False
    after: bool = False
    upload: int | None = None
    body: bytes | None = None

    def meets(self, method: str, path: str) -> bool:
        return re.fullmatch(self.method, method) is not None and re.search(self.path, path) is not None


def read_body(request: BaseHTTPRequestHandler) -> bytes:
    """The body of a request, by its length or in chunks (RFC 9112, 7.1)."""
    if request.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))
    parts = []
    while size := int(request.rfile.readline().split(b";")[0], 16):
        parts.append(request.rfile.read(size))
        request.rfile.readline()
    while request.rfile.readline().strip():
        pass
    return b"".join(parts)


class HttpProxy:
    """On 127.0.0.1. It has a `url`, with a port of its own, when it is started. It changes nothing in what it
    passes on.

    `requests` lists methods and paths as they come; `failed` those that met a fault, when it is over.

    :param upstream: `http://host:port`, with nothing behind the port.
    :param certificate: a PEM file with key and certificate: then clients come by TLS.
    """

    def __init__(self, upstream: str, certificate: Path | None = None) -> None:
        self.requests: list[tuple[str, str]] = []
        self.failed: list[tuple[str, str]] = []
        self._upstream = urlsplit(upstream).netloc
        self._faults: list[tuple[Fault, int]] = []
        self._happening: list[Fault] = []
        self._lock = Lock()
        self._certificate = certificate
        self.url = ""

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        if self._certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if self._certificate is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)

    def add(self, fault: Fault) -> None:
        """From now on, for so many requests; of several that meet a request, the first counts."""
        with self._lock:
            self._faults.append((fault, fault.times))

    def clear(self) -> None:
        """No faults any more."""
        with self._lock:
            self._faults.clear()

    @property
    def waiting(self) -> list[Fault]:
        """Faults that are not over yet, or that fewer requests have met than they hold for."""
        with self._lock:
            return [*(fault for fault, _ in self._faults), *self._happening]

    def instead(self, request: Request) -> Answer | None:
        """The proxy's own answer; None lets the request pass."""
        return None

    def changed(self, request: Request, answer: Answer) -> Answer:
        """What becomes of the answer of the server behind."""
        return answer

    def _fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((method, path))
            for place, (fault, times) in enumerate(self._faults):
                if fault.meets(method, path):
                    self._faults[place : place + 1] = [(fault, times - 1)] if times > 1 else []
                    self._happening.append(fault)
                    return fault
        return None

    def _over(self, fault: Fault, method: str, path: str) -> None:
        with self._lock:
            self._happening.remove(fault)
            self.failed.append((method, path))

    def _forward(self, request: Request) -> Answer:
        behind = HTTPConnection(self._upstream, timeout=300)
        try:
            behind.request(request.method, request.path, request.body, request.headers)
            with behind.getresponse() as answer:
                return Answer(answer.status, dict(answer.getheaders()), answer.read())
        except (OSError, HTTPException) as error:
            return Answer.of_json(502, {"error": {"message": f"{error!r}", "type": "BadGateway", "code": 502}})
        finally:
            behind.close()

    def _answer(self, request: Request) -> Answer:
        return self.instead(request) or self.changed(request, self._forward(request))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do(self) -> None:
                fault = proxy._fault(self.command, self.path)
                try:
                    if fault is not None and fault.upload is not None:
                        self.rfile.read(min(fault.upload, int(self.headers.get("Content-Length") or 0)))
                        self.close_connection = True
                    else:
                        self.do_with(fault)
                finally:
                    if fault is not None:
                        proxy._over(fault, self.command, self.path)

            def do_with(self, fault: Fault | None) -> None:
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _ANSWERED}
                request = Request(self.command, self.path, headers, read_body(self))
                if fault is None:
                    self.send(proxy._answer(request))
                    return
                time.sleep(fault.delay)
                is_ours = fault.status is not None or fault.cut is True
                answer = proxy._answer(request) if fault.after or not is_ours else None
                if fault.status is not None:
                    said = {"message": "a fault of the test", "type": "InjectedFault", "code": fault.status}
                    sent = Answer.of_json(fault.status, {"error": said})
                    self.send(sent if fault.body is None else replace(sent, body=fault.body))
                elif fault.cut is False:
                    assert answer is not None
                    self.send(answer)
                else:
                    if answer is not None and fault.cut is not True:
                        self.send(answer, fault.cut)
                    self.close_connection = True

            def handle(self) -> None:
                with suppress(ConnectionError):  # clients drop connections as they please
                    super().handle()

            def send(self, answer: Answer, cut: int | None = None) -> None:
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                if self.command == "HEAD":
                    length = next((v for k, v in answer.headers.items() if k.lower() == "content-length"), None)
                    if length is not None:
                        self.send_header("Content-Length", length)
                elif answer.status not in (204, 304):
                    self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body[:cut])

            do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do  # noqa: N815 - as http.server names them

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


class BasicAuth(HttpProxy):
    """Lets requests with this user and password pass."""

    def __init__(self, upstream: str, user: str, password: str, certificate: Path | None = None) -> None:
        super().__init__(upstream, certificate)
        self.user, self.password = user, password
        self._expected = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

    def instead(self, request: Request) -> Answer | None:
        if _header(request, "Authorization") == self._expected:
            return None
        return Answer.of_json(401, {"error_code": 401, "message": "who are you?"}, **{"WWW-Authenticate": "Basic"})


class OAuth2(HttpProxy):
    """A REST catalog with client credentials (RFC 6749, 4.4) and vended credentials.

    :param vended: properties for the files of a loaded table, for clients that ask by `X-Iceberg-Access-Delegation`.
    :param lifetime: seconds that a token is good for. It may be changed at any time.
    """

    def __init__(
        self, upstream: str, client: str, secret: str, vended: dict[str, str] | None = None, lifetime: float = 3600.0
    ) -> None:
        super().__init__(upstream)
        self.client, self.secret, self.lifetime = client, secret, lifetime
        self._vended = vended or {}
        self._tokens: dict[str, float] = {}

    TOKENS = "/v1/oauth/tokens"

    @property
    def token_url(self) -> str:
        """Where tokens are given."""
        return self.url + self.TOKENS

    def expire_tokens(self) -> None:
        """All tokens given until now are worth nothing any more."""
        self._tokens.clear()

    def instead(self, request: Request) -> Answer | None:
        if request.path.startswith(self.TOKENS):
            return self._token(request)
        given = (_header(request, "Authorization") or "").removeprefix("Bearer ")
        if self._tokens.get(given, 0.0) > time.monotonic():
            return None
        error = {"message": "The token is unknown or has expired", "type": "NotAuthorizedException", "code": 401}
        return Answer.of_json(401, {"error": error})

    def changed(self, request: Request, answer: Answer) -> Answer:
        loads = {"GET": "/tables/" in request.path, "POST": request.path.endswith("/tables")}
        asks = _header(request, "X-Iceberg-Access-Delegation")
        if not self._vended or not asks or not loads.get(request.method) or answer.status != 200:
            return answer
        loaded = json.loads(answer.body)
        loaded["config"] = {**loaded.get("config", {}), **self._vended}
        return Answer(answer.status, answer.headers, json.dumps(loaded).encode())

    def _token(self, request: Request) -> Answer:
        form = {name: values[0] for name, values in parse_qs(request.body.decode()).items()}
        given = form.get("client_id"), form.get("client_secret")
        basic = _header(request, "Authorization") or ""
        if given == (None, None) and basic.startswith("Basic "):
            client, _, secret = base64.b64decode(basic.removeprefix("Basic ")).decode().partition(":")
            given = client, secret
        is_refresh = form.get("grant_type") != "client_credentials"
        if is_refresh and self._tokens.get(form.get("subject_token", ""), 0.0) <= time.monotonic():
            return Answer.of_json(401, {"error": "invalid_client", "error_description": "the token has expired"})
        if not is_refresh and given != (self.client, self.secret):
            return Answer.of_json(401, {"error": "invalid_client", "error_description": "client or secret is wrong"})
        token = secrets.token_urlsafe(24)
        self._tokens[token] = time.monotonic() + self.lifetime
        kind = "urn:ietf:params:oauth:token-type:access_token"
        about = {"access_token": token, "token_type": "bearer", "issued_token_type": kind}
        return Answer.of_json(200, {**about, "expires_in": int(self.lifetime)})


def _header(request: Request, name: str) -> str | None:
    return next((value for key, value in request.headers.items() if key.lower() == name.lower()), None)
