"""PyIceberg's client of REST catalogs, set up like Iceberg's own, and with timeouts."""

from typing import Any

from pyiceberg.catalog.rest import RestCatalog
from requests import PreparedRequest, Response, Session
from requests.adapters import HTTPAdapter


class RestClient(RestCatalog):
    """A client whose requests fail when the server is silent. PyIceberg's own waits for ever.

    :param seconds: of silence after which a request fails.
    :param properties: the catalog's.
    """

    def __init__(self, name: str, seconds: float, **properties: str) -> None:
        self._adapter = _Adapter(seconds)  # before PyIceberg's own part, because that asks the server
        super().__init__(name, **properties)

    def _config_headers(self, session: Session) -> None:
        # PyIceberg calls it for each new session, before it asks for a token
        super()._config_headers(session)
        session.trust_env = False  # Java's client knows neither `HTTP_PROXY` nor `~/.netrc`
        for scheme in ("http://", "https://"):
            session.mount(scheme, self._adapter)


class _Adapter(HTTPAdapter):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def send(self, request: PreparedRequest, *args: Any, **options: Any) -> Response:
        return super().send(request, *args, **options | {"timeout": options.get("timeout") or self._seconds})
