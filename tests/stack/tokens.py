"""A provider of OpenID tokens on 127.0.0.1: it has a token endpoint for client credentials, and the keys that tokens
are signed with.
"""

import json
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT, SECRET = "rowdelta", "secret-of-the-client"
AUDIENCE = "kafka"


@contextmanager
def running_provider() -> Iterator[str]:
    """Yields the URL, whose paths are `/token` and `/keys`."""
    key = RSAKey.generate_key(2048, {"kid": "1", "alg": "RS256", "use": "sig"})

    class Provider(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"keys": [key.as_dict(private=False)]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            given = b64decode(self.headers.get("Authorization", "Basic ").removeprefix("Basic ")).decode()
            if given != f"{CLIENT}:{SECRET}":
                self._answer(401, {"error": "invalid_client"})
                return
            now = int(time.time())
            claims = {"sub": CLIENT, "aud": AUDIENCE, "iat": now, "exp": now + 3600, "scope": "kafka"}
            token = jwt.encode({"alg": "RS256", "kid": "1"}, claims, key)
            self._answer(200, {"access_token": token, "token_type": "Bearer", "expires_in": 3600, "scope": "kafka"})

        def _answer(self, status: int, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Provider) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
