"""The server: what it answers, and that nothing that is sent to it costs more than a little."""

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from sink.errors import ConfigError
from sink.table import observer
from sink.watch import server as served
from sink.watch.server import WatchServer
from sink.watch.state import State
from tests.watch.story import Clock, micro_batch, new_state, opened, tell

ORDERS = "lake.shop.orders"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(clock: Clock) -> State:
    made = new_state(clock)
    tell(made, [*opened(ORDERS), *micro_batch(ORDERS, 1)])
    return made


@pytest.fixture
def port(state: State, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(served, "KEPT_SECONDS", 0.0)
    server = WatchServer(state, "127.0.0.1", 0, ["Sink.Example.org"])
    server.start()
    yield server.port
    server.stop()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def send(port: int, data: bytes) -> bytes:
    """The whole answer to some bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        try:
            client.sendall(data)
            return b"".join(iter(lambda: client.recv(65536), b""))
        except (ConnectionResetError, BrokenPipeError):
            return b""


def test_each_path_answers_with_its_kind_and_safe_headers(port: int) -> None:
    kinds = {
        "/": "text/html; charset=utf-8",
        "/page.js": "text/javascript; charset=utf-8",
        "/page.css": "text/css; charset=utf-8",
        "/metrics": "text/plain; version=0.0.4; charset=utf-8",
        "/state.json": "application/json",
        "/table.json?number=0": "application/json",
        "/healthz": "application/json",
    }
    for path, kind in kinds.items():
        response, body = ask(port, path)
        assert (response.status, response.headers["Content-Type"]) == (200, kind), path
        assert body
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "Access-Control-Allow-Origin" not in response.headers
        head, nothing = ask(port, path, "HEAD")
        assert (head.status, nothing) == (200, b"")
        assert int(head.headers["Content-Length"]) > 0
    for path in ("/state", "/../../etc/passwd", "/page/index.html", "/table.json"):
        assert ask(port, path)[0].status == 404, path
    for number in ("-1", "1", "1e3", "9" * 5_000, "%D9%A3", ""):
        assert ask(port, f"/table.json?number={number}")[0].status == 404, number


def test_health_is_by_status_and_in_words(port: int, state: State, clock: Clock) -> None:
    def health(path: str) -> tuple[int, Any]:
        response, body = ask(port, path)
        return response.status, json.loads(body)

    assert health("/healthz") == (200, {"live": True, "ready": True, "problems": []})
    state(observer.TableFailed(ORDERS, "DataError", "a bad record"))
    clock.now += 601
    state(observer.LoopTurned())
    problem = f"{ORDERS} has had no commit for 601 s: a bad record"
    assert health("/healthz") == (503, {"live": True, "ready": False, "problems": [problem]})
    assert health("/healthz/ready") == (503, {"ready": False, "problems": [problem]})
    assert health("/healthz/live") == (200, {"live": True, "problems": []})
    clock.now += 601
    assert health("/healthz/live") == (503, {"live": False, "problems": ["the run has told nothing for 601 s"]})


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "NOTHING"])
def test_nothing_but_reading_is_possible(port: int, method: str) -> None:
    assert ask(port, "/state.json", method)[0].status == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8088", 200), ("localhost:8088", 200), ("[::1]:8088", 200), ("sink:8088", 200), ("10.1.2.3", 200),
        ("sink.example.org", 200), ("SINK.example.org.:80", 200), ("attacker.example", 421), ("", 421), ("[", 421),
        ("127.0.0.1.attacker.example", 421), ("user@attacker.example", 421), ("127.0.0.1@attacker.example:80", 421),
    ],
)  # fmt: skip
def test_a_foreign_name_is_refused(port: int, host: str, status: int) -> None:
    """A name of the attacker's own that leads to this address (DNS rebinding)."""
    response, body = ask(port, "/state.json", Host=host)
    assert response.status == status
    assert status == 200 or b"sink.http.hosts" in body
    assert send(port, b"GET / HTTP/1.0\r\nHost: sink\r\nHost: attacker.example\r\n\r\n").startswith(b"HTTP/1.0 421")


def test_bad_requests_are_refused_and_cost_little(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\r\n\r\n",  # TLS
        b"GET /a b HTTP/1.0\r\n\r\n",
        b"<script>alert(1)</script> / HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.0\r\n\r\n",
        b"POST / HTTP/1.0\r\nContent-Length: 100000\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000_000,  # what isn't read resets the connection, perhaps too early
    ):
        assert send(port, data)[:10] in (b"", b"HTTP/1.0 4", b"HTTP/1.1 4"), data[:40]
    assert ask(port, "/healthz/live")[0].status == 200
    assert capfd.readouterr().err == ""


def test_idle_clients_are_dropped_and_others_are_answered(port: int) -> None:
    idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(50)]
    for client in idle:
        client.sendall(b"GET / HTTP/1.1\r\n")
    assert ask(port, "/healthz/live")[0].status == 200
    for client in idle:
        assert client.recv(1) == b""
        client.close()


def test_it_ends_at_once_and_leaves_no_thread(state: State) -> None:
    before = set(threading.enumerate())
    server = WatchServer(state, "127.0.0.1", 0)
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert ask(server.port, "/healthz/live")[0].status == 200
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 2
        assert client.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        ask(server.port, "/healthz/live")
    for thread in set(threading.enumerate()) - before:
        thread.join(2)
        assert not thread.is_alive()


def test_an_answer_is_made_once_for_many_who_ask(state: State) -> None:
    server = WatchServer(state, "127.0.0.1", 0)
    server.start()
    try:
        answers = {ask(server.port, "/metrics")[1] for _ in range(5)}
        assert len(answers) == 1
        tell(state, micro_batch(ORDERS, 2))
        assert ask(server.port, "/metrics")[1] in answers
    finally:
        server.stop()


def test_a_port_in_use_is_an_error_that_names_the_key(port: int, state: State) -> None:
    with pytest.raises(ConfigError, match=rf"^sink\.http: can't listen at 127\.0\.0\.1:{port}: Address already in use"):
        WatchServer(state, "127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"^sink\.http: can't listen at 192\.0\.2\.1:8088"):
        WatchServer(state, "192.0.2.1", 8088)
    with pytest.raises(ConfigError, match=r"^sink\.http: can't listen at nowhere\.invalid:8088"):
        WatchServer(state, "nowhere.invalid", 8088)


def test_an_address_that_others_reach_is_warned_of(state: State, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rowdelta"):
        for host in ("127.0.0.1", "::1", "0.0.0.0"):
            server = WatchServer(state, host, 0)
            server.start()
            server.stop()
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert warned[0].startswith("sink.http: 0.0.0.0:")
