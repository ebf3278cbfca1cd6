"""Servers around the sink fail, hang and lie while changes come, and in the end its tables equal the source."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.faults.chain import DELTA, ICEBERG, TIMEOUT, Chain, Outcome, start
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
        f"Tables paused {len(outcome.set_aside)} times, and the sink was started again {len(outcome.ends)} times; "
        f"tables = source {outcome.seconds:.0f} s after the last change"
    )


def went_on(outcome: Outcome) -> str:
    assert not outcome.set_aside
    assert not outcome.ends
    begin = f"{outcome.requests} requests failed, and no" if outcome.requests else "No"
    return f"{begin} table paused; tables = source {outcome.seconds:.0f} s after the last change"


def paused(outcome: Outcome) -> str:
    assert outcome.set_aside or outcome.ends
    return told(outcome)


Tell = Callable[[Outcome], str]


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


@pytest.mark.fault(
    "Kafka",
    "A broker is killed, and the other one leads its partitions (`kafka.default.api.timeout.ms: 15000`)",
    "The sink goes on with that",
)
def test_the_leader_changes(chain: Chain, seen: Seen) -> None:
    assert wait_until(chain.has_second_leader)
    with killed(chain.second):
        chain.change()
        assert wait_until(lambda: chain.leaders() == {1})
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


@pytest.mark.fault(
    "Kafka",
    "Messages expire before they are read, while the sink runs, and then while it doesn't",
    "It ends by 3 and names what is lost; with failOnDataLoss: false and a new snapshot it goes on",
)
def test_messages_expire(chain: Chain, seen: Seen) -> None:
    chain.sink.pause()
    chain.change()
    chain.let_expire()
    chain.sink.resume()
    end = chain.ended()
    assert end.code == 3, end.message
    assert "messages expired in Kafka before they were read" in end.message
    chain.sink.start()
    end = chain.ended()
    assert end.code == 3, end.message
    assert re.search(r"ice.orders-\d is offset \d+, but Kafka has removed what follows before offset \d+", end.message)
    with chain.allowing_loss():
        chain.sink.start()
        chain.source.snapshot()
        chain.change()
        outcome = chain.settled()
    seen(f"It ended 2 times by 3, then tables = source {outcome.seconds:.0f} s after the last change")


# Kafka Connect --------------------------------------------------------------------------------------------------------


@pytest.mark.fault("Kafka Connect", "It sends the last 100 changes again, as after its crash", "They change nothing")
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
    door = chain.registry_door
    with killed(chain.registry):
        chain.change()
        path = f"{SCHEMA}{chain.source.schema_id}"
        assert wait_until(lambda: any(path in asked for _, asked in door.requests))
        # it keeps its schemas in memory, and must not be asked before it has them again
        door.add(Fault("GET", SCHEMA, status=503, times=1000))
    chain.source.register_again()
    door.clear()
    seen(told(chain.settled()))


@pytest.mark.parametrize(
    ("fault", "tell"),
    [
        pytest.param(
            Fault("GET", SCHEMA, delay=6),
            went_on,
            marks=pytest.mark.fault("Registry", "It takes 6 s to answer", "The sink waits for the schema"),
            id="slow",
        ),
        pytest.param(
            Fault("GET", SCHEMA, status=500, times=2),
            went_on,
            marks=pytest.mark.fault("Registry", "It answers 500 twice", "The client asks again"),
            id="500",
        ),
    ],
)
def test_the_registry_fails(chain: Chain, seen: Seen, fault: Fault, tell: Tell) -> None:
    chain.source.new_schema()
    chain.registry_door.add(fault)
    chain.provoke()
    seen(tell(chain.settled()))


# Catalog --------------------------------------------------------------------------------------------------------------

COMMIT = r"/tables/orders$"
LOAD = r"/tables/orders($|\?)"


@pytest.mark.parametrize(
    ("fault", "tell"),
    [
        pytest.param(
            Fault("POST", COMMIT, status=409, times=2),
            went_on,
            marks=pytest.mark.fault("Catalog", "It refuses two commits by 409", "They are sent again"),
            id="409",
        ),
        pytest.param(
            Fault("POST", COMMIT, status=500),
            paused,
            marks=pytest.mark.fault("Catalog", "It answers a commit by 500", "The table's position decides"),
            id="500",
        ),
        pytest.param(
            Fault("GET", LOAD, status=500),
            went_on,
            marks=pytest.mark.fault("Catalog", "It answers 500 to who loads a table", "The table is opened again"),
            id="500-load",
        ),
        pytest.param(
            Fault("POST", COMMIT, status=502, after=True),
            went_on,
            marks=pytest.mark.fault("Catalog", "It commits, and answers 502", "The sink finds its commit"),
            id="502-after",
        ),
        pytest.param(
            Fault("POST", COMMIT, status=503),
            paused,
            marks=pytest.mark.fault("Catalog", "It answers a commit by 503", "The table's position decides"),
            id="503",
        ),
        pytest.param(
            Fault("POST", COMMIT, delay=12),
            told,
            marks=pytest.mark.fault("Catalog", "It commits after the client's timeout", "The sink finds its commit"),
            id="timeout",
        ),
        pytest.param(
            Fault("POST", COMMIT, cut=True, after=True),
            went_on,
            marks=pytest.mark.fault(
                "Catalog", "It commits, and the connection ends without an answer", "The sink finds its commit"
            ),
            id="cut-after",
        ),
    ],
)
def test_the_catalog_fails(chain: Chain, seen: Seen, fault: Fault, tell: Tell) -> None:
    chain.catalog_door.add(fault)
    chain.provoke()
    seen(tell(chain.settled()))


@pytest.mark.fault("Catalog", "The token expires in the middle", "The sink gets another one")
def test_the_token_expires(chain: Chain, seen: Seen) -> None:
    door = chain.catalog_door
    logins = door.requests.count(("POST", door.TOKENS))
    door.expire_tokens()
    chain.change()
    outcome = chain.settled()
    assert door.requests.count(("POST", door.TOKENS)) == logins + 1
    seen(went_on(outcome))


@pytest.mark.fault("Catalog", "It is killed and started again", "Its table waits for it")
def test_the_catalog_is_killed(chain: Chain, seen: Seen) -> None:
    asked = len(chain.catalog_door.requests)
    with killed(chain.catalog):
        chain.change()
        assert wait_until(lambda: len(chain.catalog_door.requests) > asked + 1)
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
    ("fault", "tell"),
    [
        pytest.param(
            Fault("PUT", status=503, times=2, body=SLOW_DOWN),
            went_on,
            marks=pytest.mark.fault("Storage", "It answers writes by 503 SlowDown", "The clients try again"),
            id="503",
        ),
        pytest.param(
            Fault("PUT", status=500, times=2, body=INTERNAL),
            went_on,
            marks=pytest.mark.fault("Storage", "It answers writes by 500", "The clients try again"),
            id="500",
        ),
        pytest.param(
            Fault("PUT", delay=4),
            told,
            marks=pytest.mark.fault("Storage", "Writes take 4 s", "The sink waits"),
            id="slow",
        ),
        pytest.param(
            Fault("PUT", upload=100),
            went_on,
            marks=pytest.mark.fault("Storage", "Uploads are cut in the middle", "The clients try again"),
            id="upload",
        ),
        pytest.param(
            Fault("PUT", cut=True, after=True),
            went_on,
            marks=pytest.mark.fault(
                "Storage", "It stores files, and the connection ends without an answer", "The clients try again"
            ),
            id="cut-after",
        ),
    ],
)
def test_the_store_fails(chain: Chain, seen: Seen, fault: Fault, tell: Tell) -> None:
    for path in WRITTEN.values():
        chain.store_door.add(replace(fault, path=path))
    chain.provoke()
    seen(tell(chain.settled()))


NO_SUCH_KEY = b"<Error><Code>NoSuchKey</Code><Message>The specified key does not exist.</Message></Error>"
LISTED = r"/iceberg/.*/metadata/.*\.avro|/delta/.*/_delta_log/\d+\.json"
VECTORS = r"\.puffin"


@pytest.mark.parametrize(
    ("faults", "tell"),
    [
        pytest.param(
            [Fault("GET|HEAD", path, status=404, body=NO_SUCH_KEY) for path in LISTED.split("|")],
            paused,
            marks=pytest.mark.fault(
                "Storage", "It does not show a new manifest and a new file of Delta's log", "They are read later"
            ),
            id="404",
        ),
        pytest.param(
            [Fault("GET|HEAD", VECTORS, status=404, body=NO_SUCH_KEY)],
            paused,
            marks=pytest.mark.fault("Storage", "It does not show a new deletion vector", "It is read later"),
            id="404-vector",
        ),
        pytest.param(
            [Fault("GET", path, cut=50) for path in (*LISTED.split("|"), VECTORS)],
            paused,
            marks=pytest.mark.fault("Storage", "The connection ends within files that are read", "They are read again"),
            id="cut",
        ),
    ],
)
def test_the_store_fails_to_read(chain: Chain, seen: Seen, faults: list[Fault], tell: Tell) -> None:
    """Who reads first may be one who just reads again, and pauses no table. Then it is done once more."""
    for _ in range(5):
        for fault in faults:
            chain.store_door.add(fault)
        chain.provoke()
        outcome = chain.settled()
        if outcome.set_aside or outcome.ends:
            break
    seen(tell(outcome))


@pytest.mark.fault(
    "Storage",
    "At the start it does not show the key indexes, and then not the data files of which they are built",
    "They are built again",
)
def test_the_indexes_are_not_found(chain: Chain, seen: Seen) -> None:
    for target in (ICEBERG, DELTA):
        chain.store_door.add(Fault("GET|HEAD", f"/lake/index/.*{target}", status=404, body=NO_SUCH_KEY))
    for path in DATA.split("|"):
        chain.store_door.add(Fault("GET|HEAD", path, status=404, body=NO_SUCH_KEY))
    chain.restart()
    chain.provoke()
    seen(told(chain.settled()))


@pytest.mark.fault(
    "Storage",
    "It does not show data files with rows that updates without all values build on",
    "They are read later",
)
def test_old_rows_are_not_found(chain: Chain, seen: Seen) -> None:
    for path in DATA.split("|"):
        chain.store_door.add(Fault("GET|HEAD", path, status=404, body=NO_SUCH_KEY))
    chain.provoke(partial=True)
    seen(told(chain.settled()))


@pytest.mark.fault(
    "Storage", "It is killed and started again", "Clients try again or the sink says so, and it goes on when it is back"
)
def test_the_store_is_killed(chain: Chain, seen: Seen) -> None:
    with killed(chain.s3):
        chain.change()
        # S3A alone tries for minutes, if it is in the middle of something
        wait_until(chain.has_noticed, 30)
    seen(told(chain.settled()))


# Storage that has the checkpoint too ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def restarted(started: Chain) -> Iterator[Chain]:
    with started.in_the_bucket():
        started.restart()
        yield started


@pytest.fixture
def in_the_bucket(restarted: Chain) -> Chain:
    """A chain as it was before anything failed, whose sink has its checkpoint in the bucket and merges small files."""
    restarted.begin()
    return restarted


STATE = r"/lake/state/"


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(
            [
                Fault("PUT|DELETE", STATE, status=503, times=3, body=SLOW_DOWN),
                Fault("PUT|DELETE", STATE, status=500, times=3, body=INTERNAL),
            ],
            marks=pytest.mark.fault(
                "Storage",
                "It answers by 503 SlowDown and by 500 when the checkpoint is written, which is in the bucket",
                "The client tries again",
            ),
            id="503-500",
        ),
        pytest.param(
            [Fault("PUT", STATE, delay=TIMEOUT + 1)],
            marks=pytest.mark.fault(
                "Storage",
                "It stores a file of the checkpoint after the client's timeout",
                "The client tries again",
            ),
            id="timeout",
        ),
        pytest.param(
            [Fault("PUT|DELETE", STATE, cut=True, after=True, times=6)],
            marks=pytest.mark.fault(
                "Storage",
                "It stores and deletes files of the checkpoint, and the connection ends without an answer",
                "The client tries again",
            ),
            id="cut-after",
        ),
    ],
)
def test_the_checkpoint_in_the_bucket(in_the_bucket: Chain, seen: Seen, faults: list[Fault]) -> None:
    chain = in_the_bucket
    for fault in faults:
        chain.store_door.add(fault)
    chain.provoke()
    seen(told(chain.settled()))


@pytest.mark.fault(
    "Storage",
    "It does not show the small files that a minor compaction merges",
    "They are merged later",
)
def test_small_files_are_not_found(in_the_bucket: Chain, seen: Seen) -> None:
    chain = in_the_bucket
    for path in DATA.split("|"):
        chain.store_door.add(Fault("GET|HEAD", path, status=404, body=NO_SUCH_KEY))
    chain.provoke(rounds=40)
    for target in (ICEBERG, DELTA):
        line = f"{target}: small files not merged, tried again later"
        assert wait_until(lambda: line in chain.news()), chain.news()[-10_000:]  # noqa: B023
    for _ in range(40):
        chain.change()
        outcome = chain.settled()
        if all(f"{target}: merged " in chain.news() for target in (ICEBERG, DELTA)):
            break
    else:
        raise AssertionError(chain.news()[-10_000:])
    seen(went_on(outcome))
