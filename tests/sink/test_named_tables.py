"""Which tables of the source a topic names, and from where on: without a broker."""

from typing import cast

from sink.sources.checkpoint import CheckpointFolder
from sink.sources.named_tables import NamedTables


class Folder:
    def __init__(self) -> None:
        self.text = ""

    def read(self, name: str) -> str:
        return self.text

    def write(self, name: str, text: str) -> None:
        self.text = text


def opened(folder: Folder) -> NamedTables:
    return NamedTables(cast(CheckpointFolder, folder), "tables.json")


def test_a_name_is_known_with_where_it_may_begin() -> None:
    """Nothing before these offsets can be of the table. The first search says nothing of that."""
    folder = Folder()
    named = opened(folder)
    named.add("shop", {"0": 0}, {"0": 9}, ["early"])
    assert named.names == {}, "nobody searches this topic"
    assert named.of("shop", "id", {"0": 10, "1": 20}).searched == {}
    named.add("shop", {}, {"0": 10, "1": 20}, ["orders"])
    named.store()
    named.add("shop", {"0": 10}, {"0": 15}, ["orders", "users"])
    named.add("shop", {"0": 5, "1": 20}, {"0": 12, "1": 30}, ["orders", "items"])
    named.add("shop", {"1": 31}, {"1": 40}, ["lost"])  # there is a gap before it
    named.add("shop", {"2": -2}, {"2": 7}, ["new"])  # a partition that was added
    assert [named.first("shop", name) for name in ("orders", "users", "items", "new", "lost")] == [
        {}, {"0": 10, "1": 20}, {"0": 15, "1": 20}, {"0": 15, "1": 30}, {}
    ]  # fmt: skip
    assert named.of("shop", "id", {"0": 15, "1": 40, "2": 7}).searched == {"0": 15, "1": 30, "2": 7}

    # after a crash, what came since the file was written is searched again
    again = opened(folder)
    assert again.of("shop", "id", {"0": 15, "1": 40}).searched == {"0": 10, "1": 20}
    assert again.names == {"shop": {"orders"}}
    # and all of it, if the file is cut off, or if the topic is another one
    folder.text = folder.text[:-9]
    assert opened(folder).of("shop", "id", {"0": 15, "1": 40}).searched == {}
    assert again.of("shop", "id2", {"0": 15, "1": 40}).tables == {}
    named.store()
    assert opened(folder).of("shop", "id", {"0": 14, "1": 40, "2": 7}).searched == {}, "it is shorter"
