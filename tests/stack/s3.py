"""An S3 store over a folder, which refuses requests that aren't signed with its key: versitygw or S3Proxy."""

from contextlib import AbstractContextManager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from tests.stack.container import Container, has
from tests.stack.jars import HERE, jars
from tests.stack.process import Process, Service, free_ports, java, running


class S3(Service):
    """A store on 127.0.0.1 which keeps its objects while it is stopped. Its bucket is `BUCKET`.

    `endpoint` is for this machine, `endpoint_inside` for the catalog, which may be in a container beside it.
    """

    BUCKET = "lake"
    KEY = "AKIDROWDELTATEST"
    SECRET = "NobodyMaySeeThisSecret"
    REGION = "us-east-1"

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.endpoint = self.endpoint_inside = f"http://127.0.0.1:{port}"
        self._runner = self._container(port) if has("s3") else self._local(folder)

    def _container(self, port: int) -> Container:
        container = Container("s3", port, self._answers)
        container.environment |= {"ROOT_ACCESS_KEY": self.KEY, "ROOT_SECRET_KEY": self.SECRET}
        self.endpoint_inside = f"http://{container.inside}"
        return container

    def _local(self, folder: Path) -> Process:
        objects = folder / "objects"
        # a bucket is a folder
        (objects / self.BUCKET).mkdir(parents=True)
        settings = {
            "s3proxy.endpoint": self.endpoint,
            "s3proxy.authorization": "aws-v2-or-v4",
            "s3proxy.identity": self.KEY,
            "s3proxy.credential": self.SECRET,
            "jclouds.provider": "filesystem-nio2",
            "jclouds.filesystem.basedir": str(objects),
        }
        file = folder / "s3proxy.conf"
        file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        command = java(jars(HERE / "ivy-s3proxy.xml"), "org.gaul.s3proxy.Main", "--properties", str(file))
        return Process(command, folder / "s3.log", self._answers)

    def _answers(self) -> bool:
        try:
            urlopen(self.endpoint, timeout=5).close()
            return True
        except HTTPError as error:
            error.close()
            return error.code == 403  # nothing without a key
        except (URLError, ConnectionError, TimeoutError):
            return False


def running_s3() -> AbstractContextManager[S3]:
    """A started store; its objects are gone when the block ends."""
    return running(S3, "s3")
