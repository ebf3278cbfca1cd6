"""A server's certificate for 127.0.0.1 that signs itself, made anew for each run."""

from dataclasses import dataclass
from pathlib import Path

from tests.stack.process import finish


@dataclass(frozen=True)
class Certificate:
    """PEM files: `server` has key and certificate, and `authority` is what clients trust."""

    server: Path
    authority: Path


def self_signed(folder: Path) -> Certificate:
    """In this folder, by openssl."""
    key, authority, server = (folder / name for name in ("key.pem", "authority.pem", "server.pem"))
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key), "-out", str(authority)]
    finish(command, "openssl made no certificate")
    server.write_text(key.read_text() + authority.read_text())
    return Certificate(server, authority)
