"""Servers around the sink fail, hang and lie while changes come, and in the end its tables equal the source."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.faults.chain import Chain, Outcome, start
from tests.faults.plugin import Seen
from tests.stack.process import Service, wait_until
from tests.stack.proxy import Fault

pytestmark = [pytest.mark.spark, pytest.mark.kafka]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    chain = Chain(tmp_path_factory.mktemp("chain"))
    with chain.running():
        yield chain


@pytest.fixture
def chain(started: Chain) -> Chain:
    """As it was before anything failed."""
    started.begin()
    return started


def told(outcome: Outcome) -> str:
    """In words whose figures alone depend on the machine."""
    return (
        f"{outcome.requests} requests failed; the sink set a table aside {len(outcome.set_aside)} times and ended "
        f"{len(outcome.ends)} times; tables = source {outcome.seconds:.0f} s after the last change"
    )


@contextmanager
def killed(*servers: Service) -> Iterator[None]:
    """In the meantime."""
    for server in servers:
        server.kill()
    try:
        yield
    finally:
        start(servers)


# Kafka ----------------------------------------------------------------------------------------------------------------


@pytest.mark.fault("Kafka", "Both brokers are killed and started again", "The sink waits for them")
def test_all_brokers_are_killed(chain: Chain, seen: Seen) -> None:
    chain.change()
    with killed(*chain.brokers):
        chain.source.change(20)
    chain.change()
    seen(told(chain.settled()))


@pytest.mark.fault("Kafka", "A broker is killed, and the other one leads its partitions", "The sink goes on with that")
def test_the_leader_changes(chain: Chain, seen: Seen) -> None:
    chain.change()
    with killed(chain.second):
        chain.change()
        outcome = chain.settled()
    seen(told(outcome))


@pytest.mark.fault("Kafka", "Both brokers hang for 10 s", "The sink waits for them")
def test_all_brokers_hang(chain: Chain, seen: Seen) -> None:
    chain.change()
    for broker in chain.brokers:
        broker.pause()
    try:
        chain.source.change(20)
        time.sleep(10)  # that is the fault
    finally:
        for broker in chain.brokers:
            broker.resume()
    chain.change()
    seen(told(chain.settled()))


# Kafka Connect --------------------------------------------------------------------------------------------------------


@pytest.mark.fault("Kafka Connect", "It sends the last 100 changes again, as after a crash", "They change nothing")
def test_messages_come_again(chain: Chain, seen: Seen) -> None:
    chain.change(100)
    chain.settled()
    assert chain.source.send_again() == 200
    chain.change(1)
    seen(told(chain.settled()))


# Registry -------------------------------------------------------------------------------------------------------------

SCHEMA = r"/schemas/ids/"


@pytest.mark.fault("Registry", "It is killed before the sink knows a new schema", "Nothing is applied until it is back")
def test_the_registry_is_killed(chain: Chain, seen: Seen) -> None:
    chain.source.new_schema()
    with killed(chain.registry):
        chain.change()
        path = f"{SCHEMA}{chain.source.schema_id}"
        assert wait_until(lambda: any(path in asked for _, asked in chain.registry_door.requests))
    chain.source.register_again()
    seen(told(chain.settled()))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            Fault("GET", SCHEMA, delay=6),
            marks=pytest.mark.fault("Registry", "It takes 6 s to answer", "The sink waits for the schema"),
            id="slow",
        ),
        pytest.param(
            Fault("GET", SCHEMA, status=500, times=2),
            marks=pytest.mark.fault("Registry", "It answers 500 twice", "The client asks again"),
            id="500",
        ),
    ],
)
def test_the_registry_fails(chain: Chain, seen: Seen, fault: Fault) -> None:
    chain.source.new_schema()
    chain.registry_door.add(fault)
    chain.provoke()
    seen(told(chain.settled()))


# Catalog --------------------------------------------------------------------------------------------------------------

COMMIT = r"/tables/orders$"
LOAD = r"/tables/orders($|\?)"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            Fault("POST", COMMIT, status=409, times=2),
            marks=pytest.mark.fault("Catalog", "It refuses two commits by 409", "They are sent again"),
            id="409",
        ),
        pytest.param(
            Fault("POST", COMMIT, status=500),
            marks=pytest.mark.fault("Catalog", "It answers a commit by 500", "The table's position decides"),
            id="500",
        ),
        pytest.param(
            Fault("GET", LOAD, status=500),
            marks=pytest.mark.fault("Catalog", "It answers 500 to who loads a table", "The table is opened again"),
            id="500-load",
        ),
        pytest.param(
            Fault("POST", COMMIT, status=502, after=True),
            marks=pytest.mark.fault("Catalog", "It commits, and answers 502", "The sink finds its commit"),
            id="502-after",
        ),
        pytest.param(
            Fault("POST", COMMIT, status=503),
            marks=pytest.mark.fault("Catalog", "It answers a commit by 503", "The table's position decides"),
            id="503",
        ),
        pytest.param(
            Fault("POST", COMMIT, delay=7),
            marks=pytest.mark.fault("Catalog", "It commits after the client's timeout", "The sink finds its commit"),
            id="timeout",
        ),
        pytest.param(
            Fault("POST", COMMIT, cut=True, after=True),
            marks=pytest.mark.fault(
                "Catalog", "It commits, and the connection ends without an answer", "The sink finds its commit"
            ),
            id="cut-after",
        ),
    ],
)
def test_the_catalog_fails(chain: Chain, seen: Seen, fault: Fault) -> None:
    chain.catalog_door.add(fault)
    chain.provoke()
    seen(told(chain.settled()))


@pytest.mark.fault("Catalog", "The token expires in the middle", "The sink gets another one")
def test_the_token_expires(chain: Chain, seen: Seen) -> None:
    chain.catalog_door.expire_tokens()
    chain.change()
    seen(told(chain.settled()))


@pytest.mark.fault("Catalog", "It is killed and started again", "Its table waits for it")
def test_the_catalog_is_killed(chain: Chain, seen: Seen) -> None:
    asked = len(chain.catalog_door.requests)
    with killed(chain.catalog):
        chain.change()
        assert wait_until(lambda: len(chain.catalog_door.requests) > asked)
    seen(told(chain.settled()))


# Storage --------------------------------------------------------------------------------------------------------------

DATA = r"/iceberg/.*/data/.*\.parquet|/delta/shop/orders/[^_].*\.parquet"
WRITTEN = {
    "data files": DATA,
    "vectors": r"/iceberg/.*\.puffin",
    "manifests": r"/iceberg/.*/metadata/.*\.avro",
    "log": r"/delta/.*/_delta_log/\d+\.json",
    "index": r"/lake/index/",
}
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
INTERNAL = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            Fault("PUT", status=503, times=2, body=SLOW_DOWN),
            marks=pytest.mark.fault("Storage", "It answers writes by 503 SlowDown", "The clients try again"),
            id="503",
        ),
        pytest.param(
            Fault("PUT", status=500, times=2, body=INTERNAL),
            marks=pytest.mark.fault("Storage", "It answers writes by 500", "The clients try again"),
            id="500",
        ),
        pytest.param(
            Fault("PUT", delay=4),
            marks=pytest.mark.fault("Storage", "Writes take 4 s", "The sink waits"),
            id="slow",
        ),
        pytest.param(
            Fault("PUT", upload=100),
            marks=pytest.mark.fault("Storage", "Uploads are cut in the middle", "The clients try again"),
            id="upload",
        ),
        pytest.param(
            Fault("PUT", cut=True, after=True),
            marks=pytest.mark.fault(
                "Storage", "It stores files, and the connection ends without an answer", "The clients try again"
            ),
            id="cut-after",
        ),
    ],
)
def test_the_store_fails(chain: Chain, seen: Seen, fault: Fault) -> None:
    for path in WRITTEN.values():
        chain.store_door.add(replace(fault, path=path))
    chain.provoke()
    seen(told(chain.settled()))


READ = {
    "vectors": r"/iceberg/.*\.puffin",
    "manifests": r"/iceberg/.*/metadata/.*\.avro",
    "log": r"/delta/.*/_delta_log/\d+\.json",
    "index": r"/lake/index/",
}
NO_SUCH_KEY = b"<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message></Error>"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            Fault("GET|HEAD", status=404, body=NO_SUCH_KEY),
            marks=pytest.mark.fault(
                "Storage", "Files that were just written are not found at first", "They are read later"
            ),
            id="404",
        ),
        pytest.param(
            Fault("GET", cut=50),
            marks=pytest.mark.fault("Storage", "The connection ends within a file that is read", "It is read again"),
            id="cut",
        ),
    ],
)
@pytest.mark.parametrize("kind", READ)
def test_the_store_fails_to_read(chain: Chain, fault: Fault, kind: str) -> None:
    print(
        kind,
        fault,
        Counter(re.sub(r"[-0-9a-f]{8,}", "#", f"{m} {p}") for m, p in chain.store_door.requests).most_common(60),
    )
    chain.store_door.add(replace(fault, path=READ[kind]))
    chain.provoke()
    print(told(chain.settled()), chain.news())


@pytest.mark.fault("Storage", "It is killed and started again", "The sink ends by 75, and the next start goes on")
def test_the_store_is_killed(chain: Chain, seen: Seen) -> None:
    asked = len(chain.store_door.requests)
    with killed(chain.s3):
        chain.change()
        assert wait_until(lambda: len(chain.store_door.requests) > asked)
    seen(told(chain.settled()))
