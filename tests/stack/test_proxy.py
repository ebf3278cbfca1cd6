"""The proxy fails when it is told to, and at no other time."""

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlencode, urlsplit

import pytest

from tests.stack.proxy import Answer, BasicAuth, Fault, HttpProxy, OAuth2, Request


class Server(HttpProxy):
    """One that stands in front of nothing, and counts what it does."""

    def instead(self, request: Request) -> Answer | None:
        loaded = {"metadata-location": "s3://lake/t", "config": {"own": "1"}}
        return Answer.of_json(200, loaded if "/tables/" in request.path else request.body.decode())


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("http://nowhere") as started:
        yield started


def ask(
    url: str, method: str = "GET", path: str = "/", body: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    connection = HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        with connection.getresponse() as answer:
            return answer.status, answer.read()
    finally:
        connection.close()


def test_faults_hold_for_so_many_requests_that_they_meet(server: Server) -> None:
    with HttpProxy(server.url) as proxy:
        proxy.add(Fault("POST", "/tables", status=409, times=2))
        proxy.add(Fault("POST", "/tables/a$", status=502, after=True))
        assert ask(proxy.url)[0] == 200
        answers = [ask(proxy.url, "POST", "/tables/a", "x")[0] for _ in range(4)]
        assert answers == [409, 409, 502, 200]
        assert [path for method, path in server.requests if method == "POST"] == ["/tables/a"] * 2, "502 came after it"
        assert len(proxy.requests) == 5


def test_faults_of_the_connection(server: Server) -> None:
    with HttpProxy(server.url) as proxy:
        proxy.add(Fault(cut=True))
        with pytest.raises((OSError, HTTPException)):
            ask(proxy.url, "POST", body="lost")
        assert server.requests == []
        proxy.add(Fault(cut=True, after=True))
        with pytest.raises((OSError, HTTPException)):
            ask(proxy.url, "POST", body="done")
        proxy.add(Fault(cut=4))
        with pytest.raises(HTTPException):
            ask(proxy.url, "POST", body="a long answer")
        assert len(server.requests) == 2
        proxy.add(Fault(delay=0.3))
        begun = time.monotonic()
        assert ask(proxy.url) == (200, b'""')
        assert time.monotonic() - begun >= 0.3
        proxy.add(Fault(status=500))
        proxy.clear()
        assert ask(proxy.url)[0] == 200


def test_an_upload_is_cut_in_the_middle(server: Server) -> None:
    with HttpProxy(server.url) as proxy:
        proxy.add(Fault("PUT", upload=1000))
        with pytest.raises((OSError, HTTPException)):
            ask(proxy.url, "PUT", body="x" * 10_000_000)
        assert server.requests == []
        assert proxy.failed == [("PUT", "/")]
        assert proxy.waiting == []
        assert ask(proxy.url, "PUT", body="x" * 1_000_000)[0] == 200


def test_the_server_behind_is_gone() -> None:
    with HttpProxy("http://127.0.0.1:9") as proxy:
        assert ask(proxy.url)[0] == 502


def test_user_and_password(server: Server) -> None:
    with BasicAuth(server.url, "ada", "secret") as proxy:
        assert ask(proxy.url)[0] == 401
        assert ask(proxy.url, headers={"Authorization": "Basic YWRhOnNlY3JldA=="})[0] == 200
        assert len(server.requests) == 1


def test_tokens_and_vended_credentials(server: Server) -> None:
    with OAuth2(server.url, "ada", "secret", {"s3.access-key-id": "vended"}) as proxy:

        def token(secret: str) -> tuple[int, bytes]:
            form = {"grant_type": "client_credentials", "client_id": "ada", "client_secret": secret}
            return ask(proxy.url, "POST", proxy.TOKENS, urlencode(form))

        assert token("wrong")[0] == 401
        given = json.loads(token("secret")[1])
        assert given["expires_in"] == 3600
        headers = {"Authorization": f"Bearer {given['access_token']}"}
        assert ask(proxy.url)[0] == 401
        assert json.loads(ask(proxy.url, path="/v1/tables/t", headers=headers)[1])["config"] == {"own": "1"}
        headers["X-Iceberg-Access-Delegation"] = "vended-credentials"
        config = json.loads(ask(proxy.url, path="/v1/tables/t", headers=headers)[1])["config"]
        assert config == {"own": "1", "s3.access-key-id": "vended"}
        proxy.expire_tokens()
        assert ask(proxy.url, headers=headers)[0] == 401
        proxy.lifetime = 0.0
        headers["Authorization"] = f"Bearer {json.loads(token('secret')[1])['access_token']}"
        assert ask(proxy.url, headers=headers)[0] == 401
