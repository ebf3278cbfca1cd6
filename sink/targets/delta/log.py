"""The transaction log of a Delta table: what is in it, and how something gets into it.

Only this module, `scala` and `commands` know the classes of delta-spark, by py4j. They were tried with 3.3.3 (Spark
3.5) and 4.4.0 (Spark 4.0 and 4.1). To the rest of the sink a log is versions, and a version is a list of actions
(`sink.targets.delta.actions`): `{"add": {…}}`, `{"remove": {…}}`, `{"txn": {…}}`, `{"domainMetadata": {…}}`.

    log = DeltaLog(spark, "s3a://lake/shop/orders")
    snapshot = log.refresh()
    log.commit(Proposal(actions, base_version=snapshot.version, …))

A commit declares that it has read the whole table and its `txn`. So Delta itself refuses it after any foreign change of
data or metadata, and after another driver's commit of the same `txn` or domain. Commits that change none of it pass, as
do two kinds of a change of protocol: a feature that is only listed, and the row tracking of a table that had none.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sink.errors import ConfigError, RolledBackError, RowdeltaError, TableError, TableGoneError, TemporaryError
from sink.spark.java_errors import JAVA_ERRORS, java_class, java_message
from sink.targets.delta.actions import ACTIONS, Commit, Metadata, Proposal, Protocol, check_removes
from sink.targets.delta.scala import DELTA, Scala
from sink.targets.values import CommitUnknownError

_MOST_READ = 100
"""So many commits are read one by one to learn what they changed; with more, Delta reads them in parallel."""
_LOOKS = 5
"""The log is read this many times to find out whether a commit happened."""
_MISSING = ("FileNotFoundException", "NoSuchFileException")
_NEWER_PROTOCOL = ("InvalidProtocolVersionException", "DeltaUnsupportedTableFeatureException")
_BROKEN_LOG = (
    "DELTA_VERSIONS_NOT_CONTIGUOUS",
    "DELTA_TRUNCATED_TRANSACTION_LOG",
    "DELTA_LOG_FILE_NOT_FOUND",
    "DELTA_STATE_RECOVER_ERROR",
    "DELTA_MISSING_DELTA_FILES",
    "DELTA_VERSION_NOT_CONTIGUOUS",
)


class CommitRefusedError(Exception):
    """Nothing was committed, because of what others have committed since. Look at the table and write again.

    :param conflict: simple name of Delta's exception (`ConcurrentAppendException`, …), or `StaleVersion` if the table
        had moved on before anything was sent.
    """

    def __init__(self, conflict: str, message: str) -> None:
        super().__init__(message)
        self.conflict = conflict


class LogGapError(TableError):
    """A file in the middle of the log is missing."""


@dataclass(frozen=True)
class _State:
    """What a version says beside files: see `Snapshot.domains` and `Snapshot.transactions`."""

    version: int
    domains: Mapping[str, str]
    transactions: Mapping[str, int]

    def after(self, commits: Iterable[Commit]) -> "_State":
        version, domains, transactions = self.version, dict(self.domains), dict(self.transactions)
        for commit in commits:
            version = commit.version
            for action in commit.actions:
                if "domainMetadata" in action:
                    domain = action["domainMetadata"]
                    if domain.get("removed"):
                        domains.pop(domain["domain"], None)
                    else:
                        domains[domain["domain"]] = domain["configuration"]
                elif "txn" in action:
                    transactions[action["txn"]["appId"]] = action["txn"]["version"]
        return _State(version, domains, transactions)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The table at one version. What costs time is read when it is asked for."""

    version: int
    metadata: Metadata
    protocol: Protocol
    java: JavaObject = field(repr=False)
    log: "DeltaLog" = field(repr=False)

    @cached_property
    def timestamp_ms(self) -> int:
        """Milliseconds since 1970, as time travel counts them: the commit's own timestamp, or its file's."""
        with self.log.translated():
            return int(self.java.timestamp())

    @property
    def domains(self) -> Mapping[str, str]:
        """The configuration of each metadata domain. The first call on a table takes about a second: Delta replays the
        log. Later ones read the commits in between.
        """
        return self._state.domains

    @property
    def transactions(self) -> Mapping[str, int]:
        """The newest `txn` version of each application. As cheap as `domains`."""
        return self._state.transactions

    @cached_property
    def _state(self) -> _State:
        return self.log.state(self)


class DeltaLog:
    """The log of one table, for one thread. The table needn't be there yet.

    :param spark: a session with Delta's jars, whose settings and file systems are used.
    :param path: the table's folder, of any file system that Spark reads.
    :param apart: Delta shares what it knows of a table among all threads of the JVM, and a commit waits while another
        thread makes the table's state out of a long log. This one shares nothing with others.
    :raises TableError: Delta can't read it.
    :raises ConfigError: the session isn't made for Delta.
    :raises TemporaryError: the file system doesn't answer.
    """

    def __init__(self, spark: SparkSession, path: str, *, apart: bool = False) -> None:
        self.path = path
        self.spark = spark
        self._latest: Snapshot | None = None
        self._newest_txn: tuple[int, str] | None = None
        """Version and `txnId` of the newest commit that was written or read here."""
        self._replaced: str | None = None
        """What happened to that commit, if another driver has replaced it. Nothing that is known here holds then."""
        self._known: _State | None = None
        self._checkpoint_version = 0
        self.scala = scala = Scala(spark)
        with self.translated():
            self._path = scala.jvm.org.apache.hadoop.fs.Path
            self._update_mode = scala.jvm.org.apache.spark.sql.streaming.OutputMode.Update()
            # Delta keeps one for each table and each set of such options
            options = scala.map_of({"fs.rowdelta.apart": "true"} if apart else {})
            self.java = scala.type("DeltaLog").forTable(spark._jsparkSession, self._path(path), options)
            self._streaming_update = scala.type("DeltaOperations$StreamingUpdate")
            self._checkpoint_hook = scala.set_of(scala.object("hooks.CheckpointHook"))
        self._log_path = str(self.java.logPath().toString())
        self._types = {name: scala.list_type(f"{DELTA}.actions.{java}", self.java) for name, java in ACTIONS.items()}

    # -- what is there

    def exists(self) -> bool:
        """Whether there is a table now. Errors as of `refresh`."""
        with self.translated():
            return int(self._update().version()) >= 0

    def refresh(self) -> Snapshot:
        """The newest version. A few milliseconds if there is nothing new.

        :raises TableGoneError: the table is gone, or another one is in its place.
        :raises RolledBackError: another driver has replaced a commit that was known here.
        :raises TableError: there is no table, Delta can't read it (newer protocol), or its log is damaged.
        :raises TemporaryError: the file system doesn't answer.
        """
        latest = self._latest
        with self.translated():
            java = self._known_to_delta()
            is_newest = self._is_newest(java)
            if not is_newest:
                java = self._update()
            version = int(java.version())
            if version < 0:
                self._refuse_missing()
            metadata = java.metadata()
            if latest is None:
                self._latest = self._snapshot(java, version)
            else:
                self._check_same(str(metadata.id()), version)
                if not is_newest:
                    self._check_not_replaced()
                if version != latest.version:
                    self._latest = self._snapshot(java, version)
        assert self._latest is not None
        return self._latest

    def committed(self, version: int) -> Snapshot:
        """What the log says after our own commit of this version. Nobody is asked: Delta knows it. Errors as of
        `refresh`.
        """
        with self.translated():
            java = self._known_to_delta()
            if int(java.version()) != version:
                return self.refresh()
            self._check_same(str(java.metadata().id()), version)
            self._latest = self._snapshot(java, version)
        return self._latest

    def list_again(self) -> None:
        """Have Delta list the log, so that it knows a new checkpoint, and what follows it only. Call this between two
        commits: one that is under way would forget it.
        """
        with self.translated():
            self._update()

    def _update(self) -> JavaObject:
        """Delta lists the log, which takes longer for each version that is kept: 0.1 s for 2,600 files on a local disk.
        Most stores have only such lists.
        """
        return self.java.update(False, self.scala.none, self.scala.none)

    def _known_to_delta(self) -> JavaObject:
        """The newest version that Delta knows in this JVM."""
        return self.java.unsafeVolatileSnapshot()

    def _is_newest(self, java: JavaObject) -> bool:
        """Whether a version is the newest, and the log still that of the table that Delta has seen. A few files are
        asked for, however many there are. False also if that doesn't tell.
        """
        version = int(java.version())
        if version < 0:
            return False
        segment = java.logSegment()
        commits = segment.deltas()
        count = int(commits.length())
        # The last file may be our own commit, into a table that was dropped and created again at this moment. So the
        # one before it has to be there too.
        seen = [commits.apply(at) for at in range(max(0, count - 2), count)]
        if not seen or str(seen[-1].getPath().getName()) != f"{version:020}.json":
            return False
        if len(seen) < 2 and version > 0:
            of_checkpoint = segment.checkpointProvider().topLevelFiles()
            if of_checkpoint.isEmpty():
                return False
            seen.insert(0, of_checkpoint.head())
        following, files = self.place(f"{self._log_path}/{version + 1:020}.json")
        return all(self._is_same(files, file) for file in seen) and not files.exists(following)

    def _is_same(self, files: JavaObject, seen: JavaObject) -> bool:
        """Whether a file is as it was.

        :param files: Hadoop's file system.
        :param seen: its status then.
        """
        try:
            now = files.getFileStatus(seen.getPath())
        except Py4JJavaError as error:
            if java_class(error) in _MISSING:
                return False
            raise
        same_time = int(now.getModificationTime()) == int(seen.getModificationTime())
        return same_time and int(now.getLen()) == int(seen.getLen())

    def _refuse_missing(self) -> NoReturn:
        if self._latest is not None:
            raise TableGoneError(f"{self.path}: the Delta table is gone; its last version was {self._latest.version}.")
        raise TableError(f"{self.path}: there is no Delta table (no commit in _delta_log).")

    def _check_same(self, table_id: str, version: int) -> None:
        if self._replaced is not None:  # whoever met it first may have been another thread
            raise RolledBackError(self._replaced)
        latest = self._latest
        if latest is None or (table_id == latest.metadata.table_id and version >= latest.version):
            return
        was = f"{latest.metadata.table_id} at version {latest.version}"
        raise TableGoneError(
            f"{self.path}: another Delta table is in its place: {table_id} at version {version}, expected {was}."
        )

    def _check_not_replaced(self) -> None:
        """Not all stores keep two drivers from writing the same version: one commit then replaces the other. What is
        known of the table, here and in the JVM, is of a commit that isn't there any more.
        """
        if self._newest_txn is None:
            return
        version, known = self._newest_txn
        commit = self._commit_at(version)
        if commit is None or not commit.info or commit.info.get("txnId") == known:
            return  # without a `commitInfo`, which a setting leaves out, nothing tells
        self.scala.object("DeltaLog").invalidateCache(self.spark._jsparkSession, self._path(self.path))
        self._replaced = (
            f"{self.path}: another driver has written version {version} of _delta_log in the same moment as it was "
            "written before, and replaced it. The sink goes on from the position that the table has now. The store "
            "lets only one driver at a time write a Delta table (docs/delta.md)."
        )
        raise RolledBackError(self._replaced)

    def _snapshot(self, java: JavaObject, version: int) -> Snapshot:
        metadata = json.loads(java.metadata().json())["metaData"]
        protocol = json.loads(java.protocol().json())["protocol"]
        return Snapshot(
            version,
            Metadata(
                metadata["id"],
                metadata["schemaString"],
                tuple(metadata.get("partitionColumns", ())),
                metadata.get("configuration", {}),
            ),
            Protocol(
                protocol["minReaderVersion"],
                protocol["minWriterVersion"],
                frozenset(protocol.get("readerFeatures") or ()),
                frozenset(protocol.get("writerFeatures") or ()),
            ),
            java,
            self,
        )

    def snapshot_at(self, version: int) -> Snapshot:
        """An earlier version. About half a second, unless it is the newest.

        :raises TableError: it can't be read any more.
        """
        if self._latest is not None and version == self._latest.version:
            return self._latest
        with self.translated():
            try:
                java = self.java.getSnapshotAt(version, self.scala.none, self.scala.none, False)
            except Py4JJavaError:
                raise
            except Py4JError:  # before Delta 4.1 it has three parameters
                java = self.java.getSnapshotAt(version, self.scala.none, self.scala.none)
            return self._snapshot(java, version)

    def live_files(self, version: int) -> list[dict[str, Any]]:
        """The content of the `add` action of each live file, in any order. Delta replays the log for it.

        :raises TableError: the version can't be read.
        """
        java = self.snapshot_at(version).java
        with self.translated():
            files = DataFrame(java.allFiles().toDF(), self.spark)
            found = [json.loads(text) for (text,) in files.select(F.to_json(F.struct("*"))).collect()]
        # on Spark 4.1 every file has tags, also if its commit named none
        return [{key: value for key, value in add.items() if key != "tags" or value} for add in found]

    def state(self, snapshot: Snapshot) -> _State:
        """For `Snapshot`, which remembers it."""
        known, commits = self._known, None
        if known is not None and 0 <= snapshot.version - known.version <= _MOST_READ:
            commits = self.commits(known.version + 1, snapshot.version)
        if known is not None and commits is not None:
            self._known = known.after(commits)
            return self._known
        with self.translated():
            domains = json.loads(self.scala.mapper.writeValueAsString(snapshot.java.domainMetadata()))
            transactions = json.loads(self.scala.mapper.writeValueAsString(snapshot.java.transactions()))
        found = _State(snapshot.version, {d["domain"]: d["configuration"] for d in domains}, transactions)
        if known is None or known.version < found.version:
            self._known = found
        return found

    # -- what happened

    def frame_of(self, version: int, adds: Sequence[Mapping[str, Any]]) -> DataFrame:
        """The live rows of some files of a version, with Spark's `_metadata` columns.

        :param adds: contents of `add` actions.
        """
        snapshot = self.snapshot_at(version)
        with self.translated():
            files = self.scala.array_list()
            files.addAll(self.scala.mapper.readValue(json.dumps(list(adds)), self._types["add"]))
            arguments = [snapshot.java, self.scala.to_seq(files), False, self.scala.none]
            frame = self.java.createDataFrame(*arguments)
        return DataFrame(frame, self.spark)

    def commits(self, first: int, last: int, *, with_actions: bool = True) -> list[Commit] | None:
        """The commits of the versions from `first` to `last`. None if log clean-up has deleted some of them. Two
        milliseconds a commit on a local disk.

        :raises LogGapError: a commit between others is missing.
        """
        found: list[Commit] = []
        for version in range(first, last + 1):
            commit = self._commit_at(version)
            if commit is None:
                # Clean-up deletes the oldest commits first, maybe at this moment.
                if found and self._commit_at(first) is not None:
                    raise LogGapError(
                        f"{self.path}: version {version} is missing in _delta_log, between {version - 1} and {last}. "
                        "What it changed is unknown. Restore the file, or create the table anew."
                    )
                return None
            found.append(commit if with_actions else replace(commit, actions=()))
        return found

    def _commit_at(self, version: int) -> Commit | None:
        """None if its file is missing."""
        try:
            text = self._text(f"{version:020}.json")
        except FileNotFoundError:
            return None
        actions: list[dict[str, Any]] = []
        info: Mapping[str, Any] = {}
        try:
            for line in text.split("\n"):
                if line.strip():
                    action = json.loads(line)
                    info = action.get("commitInfo") or info
                    if "commitInfo" not in action:
                        actions.append(action)
        except (ValueError, AttributeError) as error:
            raise TableError(f"{self.path}: version {version} in _delta_log isn't valid JSON ({error}).") from None
        self._know(version, info.get("txnId"))
        return Commit(version, actions, info)

    def _know(self, version: int, txn_id: str | None) -> None:
        if txn_id is not None and (self._newest_txn is None or version > self._newest_txn[0]):
            self._newest_txn = version, txn_id

    def _text(self, name: str) -> str:
        """A file of the log, in one call to the store.

        :raises FileNotFoundError: there is none.
        """
        with self.translated(missing=True):
            file = self._path(f"{self._log_path}/{name}")
            return str(self.java.store().read(file, self._hadoop).mkString("\n"))

    @cached_property
    def _hadoop(self) -> JavaObject:
        return self.java.newDeltaHadoopConf()

    def place(self, path: str) -> tuple[JavaObject, JavaObject]:
        """Hadoop's path, and the file system that it is of."""
        found = self._path(path)
        return found, found.getFileSystem(self._hadoop)

    def _find(self, since_version: int, is_it: Any) -> int | None:
        """The first version after `since_version` that is the one; None if none is, until now.

        :raises TemporaryError: commits that could tell have been deleted by log clean-up.
        :raises RowdeltaError: as of `refresh`.
        """
        commits = self.commits(since_version + 1, self.refresh().version)
        if commits is None:
            raise TemporaryError(
                f"{self.path}: commits after version {since_version} were deleted by log clean-up, so it can't be told "
                "whether one of them was ours."
            )
        return next((commit.version for commit in commits if is_it(commit)), None)

    def history(self, limit: int, newest: int | None = None) -> Iterator[Commit]:
        """Commits from `newest` on (by default the newest one), newest first, at most `limit` and as far as their files
        are still there.
        """
        newest = self.refresh().version if newest is None else newest
        for version in range(newest, max(newest - limit, -1), -1):
            commit = self._commit_at(version)
            if commit is None:
                return
            yield commit

    def time_of(self, commit: Commit) -> int:
        """When a commit was made, in milliseconds since 1970, as time travel counts it: as it says itself, if the table
        has in-commit timestamps, or as its file says.
        """
        said = commit.info.get("inCommitTimestamp")
        if said is not None:
            return int(said)
        return self.stored_at(commit.version)

    def stored_at(self, version: int) -> int:
        """When a version's file was written, by the storage's clock, in milliseconds since 1970."""
        with self.translated():
            file, files = self.place(f"{self._log_path}/{version:020}.json")
            return int(files.getFileStatus(file).getModificationTime())

    def version_at(self, timestamp_ms: int) -> int:
        """The version that was the newest at that time, as `TIMESTAMP AS OF` finds it.

        :param timestamp_ms: milliseconds since 1970. If it is later than the newest commit, this is the answer.
        :raises TableError: the table didn't exist, or can't be read as of then any more.
        """
        with self.translated():
            history = self.java.history()
            time_stamp = self.scala.jvm.java.sql.Timestamp(timestamp_ms)
            try:
                found = history.getActiveCommitAtTime(time_stamp, self.scala.none, True, True, False)
            except Py4JJavaError:
                raise
            except Py4JError:  # Delta 3 has no parameter for the catalog's table
                found = history.getActiveCommitAtTime(time_stamp, True, True, False)
            return int(found.version())

    # -- what shall happen

    def commit(self, proposal: Proposal) -> int:
        """Commit once, or find out why not. A due checkpoint isn't written: see `checkpoint`.

        :return: the new version.
        :raises CommitRefusedError: nothing was committed; look and write again.
        :raises CommitUnknownError: it isn't known; keep the files and look.
        :raises TableGoneError: as of `refresh`. Nothing was committed.
        :raises TableError: Delta refuses the actions (`delta.appendOnly`, …), or can't write to this table.
        :raises TemporaryError: the file system doesn't answer. Nothing was committed.
        :raises ValueError: the actions contradict `proposal.live`. This is a defect of ours; nothing was sent.
        """
        check_removes(proposal.actions, proposal.live)
        with self.translated():
            transaction = self.start(proposal.base_version)
            transaction.readWholeTable()
            # `txnVersion` says the same to Delta, but replays the whole log to answer, which takes a second.
            getattr(transaction.readTxn(), "$plus$eq")(proposal.app_id)
            actions = self.scala.array_list()
            for name, java_type in self._types.items():
                some = [action[name] for action in proposal.actions if name in action]
                if some:
                    actions.addAll(self.scala.mapper.readValue(json.dumps(some), java_type))
            operation = self._streaming_update(
                self._update_mode,
                proposal.app_id,
                proposal.epoch,
                self.scala.some(proposal.user_metadata),
            )
            if proposal.metrics:
                self.scala.show_metrics(transaction, operation, proposal.metrics)
        return self.finish(transaction, proposal.base_version, actions, operation)

    def is_checkpoint_due(self, every: int) -> bool:
        """Whether the newest version known is far enough from the last checkpoint. Call this between two commits, as
        `list_again`.

        :param every: so many versions are far enough, or fewer if the table's `delta.checkpointInterval` says so.
        """
        snapshot = self._latest or self.refresh()
        with self.translated():
            java = self._known_to_delta()
            interval = min(every, int(self.java.checkpointInterval(java.metadata())))

            def is_due(java: JavaObject) -> bool:
                last = max(int(java.checkpointProvider().version()), self._checkpoint_version, 0)
                return snapshot.version - last >= interval

            # only a list shows those that were written since the last one
            return is_due(java) and is_due(self._update())

    def checkpoint(self) -> bool:
        """Write a checkpoint of the newest version known, and delete commits that the table's
        `delta.logRetentionDuration` no longer keeps. It takes seconds, and disturbs no other commit.

        :return: False if it failed. Delta's log says why, and nothing is lost.
        """
        snapshot = self._latest or self.refresh()
        with self.translated():
            self.java.checkpoint(snapshot.java, self.scala.none)
            snapshot.java.uncache()
        self._checkpoint_version = self.last_checkpoint.get("version", -1)
        return self._checkpoint_version >= snapshot.version

    @property
    def last_checkpoint(self) -> Mapping[str, int]:
        """`version` and `size` (number of actions) of the last checkpoint. Empty if there is none."""
        try:
            found = json.loads(self._text("_last_checkpoint"))
            return {name: int(found[name]) for name in ("version", "size")}
        except (FileNotFoundError, ValueError, KeyError):
            return {}

    # -- how it is sent

    def start(self, base_version: int) -> JavaObject:
        """A transaction on this version, which `finish` sends.

        :raises CommitRefusedError: it isn't the current one.
        :raises TableGoneError: as of `refresh`.
        """
        java = self._known_to_delta()
        is_known = int(java.version()) == base_version and self._is_newest(java)
        transaction = self.java.startTransaction(
            self.scala.none, self.scala.some(java) if is_known else self.scala.none
        )
        version = int(transaction.readVersion())
        if version < 0:
            self._refuse_missing()
        self._check_same(str(transaction.metadata().id()), version)
        if not is_known:
            self._check_not_replaced()
        if version != base_version:
            raise CommitRefusedError("StaleVersion", f"{self.path}: version {version} is current, not {base_version}")
        transaction.unregisterPostCommitHooksWhere(self._checkpoint_hook)
        return transaction

    def finish(self, transaction: JavaObject, base_version: int, actions: JavaObject, operation: JavaObject) -> int:
        """Send a commit once. Errors as of `commit`.

        :return: the new version.
        """
        identity = str(transaction.txnId())
        try:
            version = self._send(transaction, self.scala.to_seq(actions), operation)
        except JAVA_ERRORS as error:
            refusal = error
        else:
            self._know(version, identity)
            return version
        # A store may have written the file although it says that it failed, or that the file was there already.
        for attempt in range(_LOOKS):
            try:
                found = self._find(base_version, lambda commit: commit.info.get("txnId") == identity)
            except TableGoneError:  # and with it all that the commit could have changed
                raise
            except RowdeltaError:  # no other error of a look means that the commit failed
                time.sleep(0.2 * 2**attempt)
                continue
            if found is not None:
                return found
            if self.scala.is_a(refusal, "java.util.ConcurrentModificationException"):
                raise CommitRefusedError(java_class(refusal), java_message(refusal)) from None
            if self.scala.is_check(refusal):
                raise self.error_of(refusal) from None
            break
        raise CommitUnknownError(
            f"{self.path}: it is unknown whether the commit on version {base_version} went through "
            f"({java_class(refusal)}: {java_message(refusal)}). Its files are kept. Run again: the table's log decides."
        )

    def _send(self, transaction: JavaObject, actions: JavaObject, operation: JavaObject) -> int:
        return int(transaction.commit(actions, operation))

    @contextmanager
    def translated(self, *, missing: bool = False) -> Iterator[None]:
        """Java's errors become ours.

        :param missing: a missing file is a `FileNotFoundError`.
        """
        try:
            yield
        except JAVA_ERRORS as error:
            if missing and java_class(error) in _MISSING:
                raise FileNotFoundError(java_message(error)) from None
            raise self.error_of(error) from None

    def error_of(self, error: Exception) -> RowdeltaError:
        name, message = java_class(error), java_message(error)
        if "DELTA_CONFIGURE_SPARK_SESSION" in message:
            return ConfigError(
                f"{self.path}: the Spark session isn't made for Delta. Set spark.sql.extensions to "
                "io.delta.sql.DeltaSparkSessionExtension, and spark.sql.catalog.spark_catalog to "
                "org.apache.spark.sql.delta.catalog.DeltaCatalog."
            )
        if name in _NEWER_PROTOCOL:
            return TableError(
                f"{self.path}: the table has a newer protocol or a feature than this Delta Lake can write ({message}). "
                "Upgrade the delta-spark package, or drop the feature from the table."
            )
        if any(code in message for code in _BROKEN_LOG):
            return LogGapError(f"{self.path}: the log in _delta_log is damaged ({message}). Restore its files.")
        if self.scala.is_check(error):
            return TableError(f"{self.path}: Delta refuses it ({name}: {message})")
        return TemporaryError(f"{self.path}: {name}: {message}")
