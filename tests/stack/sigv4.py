"""A catalog's door that wants each request signed with a key, as AWS's servers do (Signature Version 4)."""

import hashlib
import hmac
import re
from urllib.parse import parse_qsl, quote, urlsplit

from tests.stack.proxy import Answer, HttpProxy, Request

_AUTHORIZATION = re.compile(r"AWS4-HMAC-SHA256 Credential=([^,]+), ?SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})")


class SigV4(HttpProxy):
    """Lets requests pass that are signed with this key, for this region and service, body included."""

    KEY = "AKIDROWDELTACATALOG"
    SECRET = "NobodyMaySeeThisSecretOfTheCatalog"
    REGION = "eu-west-1"
    SERVICE = "glue"

    def instead(self, request: Request) -> Answer | None:
        if self._is_signed(request):
            return None
        return Answer.of_json(403, {"error": {"message": "not signed", "type": "ForbiddenException", "code": 403}})

    def _is_signed(self, request: Request) -> bool:
        headers = {name.lower(): value.strip() for name, value in request.headers.items()}
        found = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
        if found is None:
            return False
        credential, names, signature = found.groups()
        key, date, *rest = credential.split("/")
        if key != self.KEY or rest != [self.REGION, self.SERVICE, "aws4_request"]:
            return False
        scope = credential.partition("/")[2]
        hashed = hashlib.sha256(_canonical(request, headers, names).encode()).hexdigest()
        text = "\n".join(["AWS4-HMAC-SHA256", headers["x-amz-date"], scope, hashed])
        signing = f"AWS4{self.SECRET}".encode()
        for part in (date, *rest):
            signing = hmac.digest(signing, part.encode(), "sha256")
        return hmac.compare_digest(hmac.new(signing, text.encode(), "sha256").hexdigest(), signature)


def _canonical(request: Request, headers: dict[str, str], names: str) -> str:
    """The canonical request (AWS, "Create a signed AWS API request"); `names` are those of the signed headers."""
    url = urlsplit(request.path)
    query = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in parse_qsl(url.query, True))
    return "\n".join(
        [
            request.method,
            quote(url.path, safe="/-_.~"),
            "&".join(f"{k}={v}" for k, v in query),
            *(f"{name}:{headers.get(name, '')}" for name in names.split(";")),
            "",
            names,
            hashlib.sha256(request.body).hexdigest(),
        ]
    )
