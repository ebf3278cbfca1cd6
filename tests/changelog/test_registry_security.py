"""Ways to log in to a schema registry: each by the real client, at a server that wants a client's certificate too."""

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from changelog.parse.schema_registry import Registry, RegistryError
from tests.stack import tls, tokens
from tests.stack.tls import Tls

PREFIX = "schema.registry."
BASIC = f"Basic {base64.b64encode(b'ada:hunter2hunter2').decode()}"
TOKEN = "Bearer token-of-ada"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return tls.made(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    with tokens.running_provider() as url:
        yield url


@pytest.fixture(scope="module")
def url(certificates: Tls) -> Iterator[str]:
    class Guarded(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = self._is_known(self.headers.get("Authorization", ""))
            content = {"schema": '"string"'} if right else {"error_code": 401, "message": "Unauthorized"}
            body = json.dumps(content).encode()
            self.send_response(200 if right else 401)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _is_known(self, given: str) -> bool:
            if given.count(".") != 2:
                return given in (BASIC, TOKEN)
            payload = given.split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
            return bool(claims["sub"] == tokens.CLIENT)

        def log_message(self, format: str, *args: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.path("server.pem"))
    context.load_verify_locations(certificates.path("ca.pem"))
    context.verify_mode = ssl.CERT_REQUIRED
    with ThreadingHTTPServer(("127.0.0.1", 0), Guarded) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # of clients that are refused
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def options(url: str, certificates: Tls, **more: str) -> dict[str, str]:
    found = {
        "url": url,
        "ssl.ca.location": certificates.path("ca.pem"),
        "ssl.certificate.location": certificates.path("client.crt"),
        "ssl.key.location": certificates.path("client.key"),
        "max.retries": "0",
        **{name.replace("_", "."): value for name, value in more.items()},
    }
    return {PREFIX + name: value for name, value in found.items()}


LOGINS = {
    "basic": {"basic_auth_user_info": "ada:hunter2hunter2"},
    "token": {"bearer_auth_credentials_source": "STATIC_TOKEN", "bearer_auth_token": "token-of-ada"},
    "provider": {
        "bearer_auth_credentials_source": "OAUTHBEARER",
        "bearer_auth_client_id": tokens.CLIENT,
        "bearer_auth_client_secret": tokens.SECRET,
        "bearer_auth_scope": "registry",
    },
}
OF_CONFLUENT = {"bearer_auth_logical_cluster": "none", "bearer_auth_identity_pool_id": "none"}


@pytest.mark.parametrize("way", LOGINS)
def test_a_user_or_a_token(way: str, url: str, provider: str, certificates: Tls) -> None:
    login = LOGINS[way] | (OF_CONFLUENT if way != "basic" else {})
    if way == "provider":
        login["bearer_auth_issuer_endpoint_url"] = f"{provider}/token"
    assert Registry(options(url, certificates, **login)).get(1).kind == "string"
    wrong = {
        name: "wrong-wrong" if name.split("_")[-1] in ("info", "token", "secret") else v for name, v in login.items()
    }
    if "basic_auth_user_info" in wrong:
        wrong["basic_auth_user_info"] = "ada:wrong-wrong"
    with pytest.raises(RegistryError) as refused:
        Registry(options(url, certificates, **wrong)).get(1)
    assert "wrong-wrong" not in str(refused.value)


def test_a_certificate_is_wanted(url: str, certificates: Tls) -> None:
    given = options(url, certificates, **LOGINS["basic"])
    without = {name: value for name, value in given.items() if "certificate" not in name and "key" not in name}
    with pytest.raises(RegistryError, match="can't be asked"):
        Registry(without).get(1)
    encrypted = {"ssl_key_location": certificates.path("client-secret.key"), "ssl_key_password": tls.PASSWORD}
    assert Registry(options(url, certificates, **LOGINS["basic"], **encrypted)).get(1).kind == "string"
