"""A broker with every kind of log-in: users with PLAIN and SCRAM, tokens of OAUTHBEARER, and clients' certificates."""

from pathlib import Path

from tests.stack.jars import HERE, jars
from tests.stack.kafka import LocalKafka
from tests.stack.process import Process, free_ports, java
from tests.stack.tls import Tls
from tests.stack.tokens import AUDIENCE

USER, PASSWORD = "ada", 'secret "of" \\kafka'
SCRAM = "SCRAM-SHA-512"
_SECURITY = "org.apache.kafka.common.security"


class SecuredKafka(LocalKafka):
    """Beside the plain listener (`bootstrap_servers`) there are two with TLS.

    :param provider: URL of a provider of tokens.
    """

    def __init__(self, folder: Path, tls: Tls, provider: str) -> None:
        super().__init__(folder)
        users, certificates = free_ports(2)
        self.for_users, self.for_certificates = f"127.0.0.1:{users}", f"127.0.0.1:{certificates}"
        settings = dict(line.split("=", 1) for line in self._settings.read_text().splitlines())
        for key in ("listeners", "advertised.listeners"):
            settings[key] += f",USERS://{self.for_users},CERTIFICATES://{self.for_certificates}"
        settings["listener.security.protocol.map"] += ",USERS:SASL_SSL,CERTIFICATES:SSL"
        quoted = PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
        plain = f'{_SECURITY}.plain.PlainLoginModule required user_{USER}="{quoted}";'
        settings |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": tls.path("server.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": tls.path("ca.pem"),
            "listener.name.certificates.ssl.client.auth": "required",
            "sasl.enabled.mechanisms": f"PLAIN,{SCRAM},OAUTHBEARER",
            "listener.name.users.plain.sasl.jaas.config": plain,
            "listener.name.users.scram-sha-512.sasl.jaas.config": f"{_SECURITY}.scram.ScramLoginModule required;",
            "listener.name.users.oauthbearer.sasl.jaas.config": (
                f"{_SECURITY}.oauthbearer.OAuthBearerLoginModule required;"
            ),
            "listener.name.users.oauthbearer.sasl.server.callback.handler.class": (
                f"{_SECURITY}.oauthbearer.OAuthBearerValidatorCallbackHandler"
            ),
            "listener.name.users.oauthbearer.sasl.oauthbearer.jwks.endpoint.url": f"{provider}/keys",
            "listener.name.users.oauthbearer.sasl.oauthbearer.expected.audience": AUDIENCE,
        }
        # in a file of properties a backslash is an escape
        lines = (f"{key}={value}\n".replace("\\", "\\\\") for key, value in settings.items())
        self._settings.write_text("".join(lines))
        command = java(jars(HERE / "ivy-kafka.xml"), "kafka.Kafka", str(self._settings))
        command.insert(1, f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={provider}/keys")
        self._runner = Process(command, folder / "kafka.log", self._answers)
