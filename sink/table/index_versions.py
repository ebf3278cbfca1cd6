"""The versions of a key index as files in its folder: a manifest and deletion vectors each, beside the runs."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from deltawriters.keyindex.versions import IndexVersion
from deltawriters.scratch import Scratch
from sink.table.engine import IndexFolder


class StoredVersions:
    """Reads and writes versions, and deletes files that none needs any more.

    :param folder: of the index.
    :param is_guest: nothing is deleted: files may be those of the next version of a process that is at work.
    """

    def __init__(self, folder: IndexFolder, *, is_guest: bool) -> None:
        self._folder = folder
        self._is_guest = is_guest
        self._current: str | None = None
        """The name of the version that the table names. None: it is one that was just built."""
        self._obsolete: list[str] = []
        """Files that the current version has no more. They go after the next commit: until then a driver that was
        replaced may look into them.
        """
        self._held: list[str] = []
        """Likewise, runs that are pinned."""
        self._unnamed = set[str]()
        """Files that nothing named when orphans were removed last."""

    def read(self, name: str) -> IndexVersion:
        """:raises IndexLostError: it is damaged.
        :raises OSError: it is missing.
        """
        return IndexVersion.from_json(self._content(_manifest(name)), lambda part: self._content(_vectors_file(part)))

    def _content(self, path: str) -> bytes:
        """:param path: relative to the folder."""
        with self._folder.io.new_input(f"{self._folder.location}/{path}").open() as stream:
            return bytes(stream.read())

    def write(self, name: str, version: IndexVersion, scratch: Scratch) -> IndexVersion:
        """Write a version's manifest and its new vectors. Returns the version with the names of the vectors' files.

        :param scratch: gets the files.
        """

        def write(name: str, content: bytes) -> None:
            path = f"{self._folder.location}/{name}"
            scratch.add(path)
            with self._folder.io.new_output(path).create(overwrite=True) as stream:
                stream.write(content)

        vectors = version.vectors.stored(name, lambda part, content: write(_vectors_file(part), content))
        stored = replace(version, vectors=vectors)
        write(_manifest(name), stored.to_json())
        return stored

    def begin_with(self, version: IndexVersion, name: str | None) -> None:
        """Delete files that this version doesn't name. They come from failed attempts, or from a process that died.

        :param name: the version's. None: it isn't stored.
        """
        self._current = name
        if not self._is_guest:
            self._folder.delete(self._not_of(version))

    def remove_orphans(self, version: IndexVersion, named: str, merging: str | None) -> None:
        """Delete files that come from guests, and from tasks that died. They may be at work on some, so only what
        nothing named the last time either is deleted: call this seldom.

        :param version: the current one.
        :param named: the name of the version that the table names. If it is a guest's, nothing is deleted.
        :param merging: beginning of the names of merged runs that a version is still to take in.
        """
        if self._is_guest or named != self._current:
            return
        used = {*self._obsolete, *(f"runs/{run}" for run in self._held)}
        others = (path for path in self._not_of(version) if merging is None or merging not in path)
        unnamed = {path for path in others if path not in used}
        self._folder.delete(unnamed & self._unnamed)
        self._unnamed = unnamed

    def _not_of(self, version: IndexVersion) -> list[str]:
        """Files that the current version doesn't name."""
        kept = {run.name for run in version.runs}
        folders = {"runs": kept, "versions": {f"{self._current}.json"}, "vectors": set(version.vectors.files)}
        return [
            f"{folder}/{file}"
            for folder, keep in folders.items()
            for file in self._folder.names(folder)
            if file.removeprefix(".").removesuffix(".crc") not in keep
        ]

    def see_committed(
        self, name: str, before: IndexVersion, version: IndexVersion, spent: Iterable[str], pinned: Collection[str]
    ) -> None:
        """The table names another version now. Deletes what was obsolete before.

        :param before: the version that the table named until now.
        :param spent: files that only the commit needed.
        :param pinned: names of runs that stay.
        """
        if not self._is_guest:
            self._folder.delete([*self._obsolete, *spent])
        kept = {run.name for run in version.runs}
        self._obsolete = []
        self._held += [run.name for run in before.runs if run.name not in kept]
        self.release(pinned)
        self._obsolete += [_vectors_file(part) for part in {*before.vectors.files} - {*version.vectors.files}]
        if self._current is not None:
            self._obsolete.append(_manifest(self._current))
        self._current = name

    def release(self, pinned: Collection[str]) -> None:
        """:param pinned: names of the runs that are still pinned."""
        self._obsolete += [f"runs/{run}" for run in self._held if run not in pinned]
        self._held = [run for run in self._held if run in pinned]


def _manifest(name: str) -> str:
    return f"versions/{name}.json"


def _vectors_file(name: str) -> str:
    return f"vectors/{name}"
