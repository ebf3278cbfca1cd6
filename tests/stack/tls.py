"""Certificates made at run time, by openssl and the JDK's keytool: an authority, a server's for 127.0.0.1, and a
client's in the forms that clients take.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.stack.process import finish

PASSWORD = "secret-of-the-stores"
_PASS = f"pass:{PASSWORD}"


@dataclass(frozen=True)
class Tls:
    """:param folder: has all files. Those in PEM: `ca.pem`, `server.pem` (key and certificate), `client.crt`,
    `client.key`, `client-secret.key` (the same with `PASSWORD`) and `client.pem` (key and certificate).
    """

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()

    def add_stores(self) -> None:
        """Stores with `PASSWORD`: `client.p12`, `client.jks`, `ca.p12`, `ca.jks`."""
        self._run("openssl", "pkcs12", "-export", "-in", "client.pem", "-out", "client.p12", "-passout", _PASS)
        stores = ("-srcstorepass", PASSWORD, "-deststorepass", PASSWORD, "-deststoretype", "JKS", "-noprompt")
        self._run("keytool", "-importkeystore", "-srckeystore", "client.p12", "-destkeystore", "client.jks", *stores)
        for kind, end in (("JKS", "jks"), ("PKCS12", "p12")):
            store = ("-keystore", f"ca.{end}", "-storetype", kind, "-storepass", PASSWORD)
            self._run("keytool", "-importcert", "-alias", "ca", "-file", "ca.crt", "-noprompt", *store)

    def _run(self, *command: str) -> None:
        finish(command, f"{command[0]} made no certificate", cwd=self.folder)

    def _request(self, name: str, *more: str) -> None:
        key = ("-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key")
        self._run("openssl", "req", "-x509", *key, "-days", "2", "-subj", f"/CN={name}", "-out", f"{name}.crt", *more)


def made(folder: Path) -> Tls:
    """In this folder, without stores."""
    certificates = Tls(folder)
    certificates._request("ca", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    certificates._request("server", *signed, "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    certificates._request("client", *signed)
    (folder / "ca.pem").write_text(certificates.text("ca.crt"))
    for name in ("server", "client"):
        (folder / f"{name}.pem").write_text(certificates.text(f"{name}.key") + certificates.text(f"{name}.crt"))
    # Java before 19 doesn't read what openssl makes by default, PBES2
    cipher = ("-v1", "PBE-SHA1-3DES", "-passout", _PASS)
    certificates._run("openssl", "pkcs8", "-topk8", "-in", "client.key", "-out", "client-secret.key", *cipher)
    return certificates
