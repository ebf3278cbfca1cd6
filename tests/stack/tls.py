"""Certificates made at run time, by openssl and the JDK's keytool: an authority, a server's for 127.0.0.1, and a
client's in the forms that clients take.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.stack.process import finish

PASSWORD = "secret-of-the-stores"


@dataclass(frozen=True)
class Tls:
    """:param folder: has all files. Those in PEM: `ca.pem`, `server.pem` (key and certificate), `client.crt`,
    `client.key`, `client-secret.key` (the same with `PASSWORD`) and `client.pem` (key and certificate).
    Stores with `PASSWORD`: `client.p12`, `client.jks`, `ca.p12`, `ca.jks`.
    """

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()


def made(folder: Path) -> Tls:
    def run(*command: str) -> None:
        finish(command, f"{command[0]} made no certificate", cwd=folder)

    def request(name: str, *more: str) -> None:
        key = ("-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key")
        run("openssl", "req", "-x509", *key, "-days", "2", "-subj", f"/CN={name}", "-out", f"{name}.crt", *more)

    request("ca", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    request("server", *signed, "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    request("client", *signed)
    (folder / "ca.pem").write_text((folder / "ca.crt").read_text())
    for name in ("server", "client"):
        (folder / f"{name}.pem").write_text((folder / f"{name}.key").read_text() + (folder / f"{name}.crt").read_text())
    # Java before 19 doesn't read what openssl makes by default, PBES2
    cipher = ("-v1", "PBE-SHA1-3DES", "-passout", f"pass:{PASSWORD}")
    run("openssl", "pkcs8", "-topk8", "-in", "client.key", "-out", "client-secret.key", *cipher)
    run("openssl", "pkcs12", "-export", "-in", "client.pem", "-out", "client.p12", "-passout", f"pass:{PASSWORD}")
    stores = ("-srcstorepass", PASSWORD, "-deststorepass", PASSWORD, "-deststoretype", "JKS", "-noprompt")
    run("keytool", "-importkeystore", "-srckeystore", "client.p12", "-destkeystore", "client.jks", *stores)
    for kind in ("JKS", "PKCS12"):
        store = ("-keystore", {"JKS": "ca.jks", "PKCS12": "ca.p12"}[kind], "-storetype", kind, "-storepass", PASSWORD)
        run("keytool", "-importcert", "-alias", "ca", "-file", "ca.crt", "-noprompt", *store)
    return Tls(folder)
