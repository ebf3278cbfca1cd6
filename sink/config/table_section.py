"""An entry of `tables:`, whose fields fit together."""

from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from sink.config.options import MisplacedError, did_you_mean
from sink.config.table_fields import TableFields
from sink.config.table_parts import NO_SHARD, PartitionField


class TableSection(TableFields):
    """One entry of `tables:`. See `TableFields`."""

    @model_validator(mode="after")
    def _topics_fit(self) -> Self:
        """:raises MisplacedError: nothing tells rows of several topics apart."""
        if self.shard is not None and (not self.many_topics or self.mode == "append"):
            why = "mode append compares no rows" if self.many_topics else "the table takes one topic"
            raise MisplacedError(f"got {self.shard}, but {why}. Leave shard out", "shard")
        if not self.many_topics or self.mode == "append":
            return self
        several = f"table {self.target} takes several topics"
        if self.shard == NO_SHARD:
            if not self.order_by:
                raise MisplacedError(
                    f"{several}, in which the same key is the same row, and nothing says which topic's change is "
                    "newer. Write order_by, with fields that say when a row was changed",
                    "order_by",
                )
            return self
        topics = [name for name, field in self.record_columns.items() if field == "_source"]
        if self.shard is not None and self.shard not in self.key:
            raise MisplacedError(f"got {self.shard}, which key doesn't name. Write it into key too", "shard")
        if self.shard is None and not set(topics) & set(self.key):
            column = topics[0] if topics else "_source"
            add = "" if topics else "metadata: [_source] and "
            raise MisplacedError(
                f"{several}, and nothing in its key tells their rows apart. Write {add}key: "
                f"[{', '.join([column, *(self.key or ['…'])])}]; or shard: with the key's column that does; or shard: "
                f"{NO_SHARD}, if the same key is the same row in all of them",
                "key",
            )
        return self

    @model_validator(mode="after")
    def _unavailable_fits(self) -> Self:
        if self.unavailable == "keep" and (why := self.cannot_keep) is not None:
            raise MisplacedError(f"table {self.target}: got keep, but {why}, or unavailable: reject", "unavailable")
        return self

    @model_validator(mode="after")
    def _ignored_nulls_fit(self) -> Self:
        ignored = self.ignore_null_updates
        if ignored is None:
            return self
        if self.cannot_keep is not None:
            raise MisplacedError(
                f"table {self.target}: an ignored NULL leaves the value of the table's row in place, but "
                f"{self.cannot_keep}, or leave ignore_null_updates out",
                "ignore_null_updates",
            )
        if self.soft_delete is not None:
            raise MisplacedError(
                f"table {self.target}: a row that soft_delete has marked would give its values to the next insert of "
                "its key. Leave one of them out",
                "ignore_null_updates",
            )
        for name in (ignored.columns or ignored.others) if self.columns is not None else ():
            if name not in self.stored_columns:
                raise MisplacedError(
                    f"it names {name!r}, which is not in columns{did_you_mean(name, self.stored_columns)}",
                    "ignore_null_updates",
                )
        return self

    @model_validator(mode="after")
    def _late_fits(self) -> Self:
        if not self.stores_order:
            if self.tombstones is not None:
                raise MisplacedError(
                    "it is for late: drop, late: dead-letter and history. Write one of them too, or leave it out",
                    "tombstones",
                )
            return self
        why = None
        if self.mode != "upsert":
            why = f"mode {self.mode} takes changes as they are. Write mode: upsert"
        elif not self.has_index:
            why = "with deletes: equality nothing tells what the table holds. Write deletes: position or copy-on-write"
        elif not self.order_by:
            why = "nothing says which changes are late. Write order_by, with fields that say when a row was changed"
        if why is not None and self.late != "apply":
            raise MisplacedError(f"table {self.target}: got {self.late}, but {why}, or late: apply", "late")
        if why is not None:
            raise MisplacedError(f"table {self.target}: got history, but {why}, or leave history out", "history")
        return self

    @model_validator(mode="after")
    def _resnapshot_fits(self) -> Self:
        """:raises MisplacedError: rows that a snapshot doesn't have can't be found, or are to stay."""
        why = None
        if self.mode != "upsert" or not self.has_index:
            why = "only a key index finds the rows to remove. Write mode: upsert and deletes: position or copy-on-write"
        elif self.many_topics:
            why = "the table takes several topics, and a snapshot has the rows of one of them. Name one topic"
        elif self.source_tables:
            why = "source names a table, and tables of several databases may have its name. Give it a topic of its own"
        elif self.shared_with:
            why = "other sinks write the table (shared_with), whose rows no snapshot of this one has"
        elif self.source_deletes == "ignore":
            why = "source_deletes: ignore keeps rows that the source doesn't have any more. Write source_deletes: apply"
        elif self.history is not None:
            why = "nothing tells since when a row has been gone, as history needs it. Leave history out"
        if self.resnapshot == "reconcile" and why is not None:
            raise MisplacedError(f"table {self.target}: got reconcile, but {why}, or resnapshot: upsert", "resnapshot")
        return self

    @model_validator(mode="after")
    def _deletes_fit(self) -> Self:
        if not self.keeps_deleted:
            return self
        name, got = ("source_deletes", "ignore") if self.soft_delete is None else ("soft_delete", "it")
        others = "leave it out" if self.soft_delete is not None else "source_deletes: apply"
        why = None
        if self.mode != "upsert":
            why = f"mode {self.mode} takes changes as they are. Write mode: upsert"
        elif self.soft_delete is not None and not self.has_index:
            why = "with deletes: equality nothing finds the row. Write deletes: position or copy-on-write"
        elif self.soft_delete is not None and self.source_deletes == "ignore":
            why = "with source_deletes: ignore no row is deleted. Keep one of the two"
        elif self.soft_delete is not None and self.history is not None:
            why = "history closes the row of a deleted key. Keep one of the two"
        elif self.source_deletes == "ignore" and self.where is not None:
            why = "where removes the rows that it isn't true for any more. Leave where out"
        elif self.truncate == "apply":
            why = "truncate: apply removes rows. Write truncate: reject"
        if why is not None:
            raise MisplacedError(f"table {self.target}: got {got}, but {why}, or {others}", name)
        for column in self.marks:
            field = "at" if column != self.marks[0] else "column"
            taken = next(
                (part for part in ("columns", "metadata", "key") if column in (getattr(self, part) or ())), None
            )
            taken = "order_column" if taken is None and self.may_hold_order(column) else taken
            if taken is not None:
                raise MisplacedError(
                    f"table {self.target}: got {column!r}, which is in {taken} too, and the sink sets this column. "
                    "Name another one",
                    name,
                    field,
                )
        return self

    @model_validator(mode="after")
    def _order_fits(self) -> Self:
        columns = self.maintenance.rewrite.sort if self.maintenance is not None else None
        if columns is None:
            return self
        path = ("maintenance", "rewrite", "sort")
        if self.mode != "append" and self.deletes == "equality":
            raise MisplacedError(
                f"table {self.target}: got sort, but with deletes: equality Iceberg's procedure rewrites its files, "
                f"which isn't told an order. Write deletes: position or copy-on-write, or leave sort out",
                *path,
            )
        for column in columns if self.columns is not None else ():
            if column not in self.stored_columns:
                raise MisplacedError(
                    f"sort names {column!r}, which is not in columns{did_you_mean(column, self.stored_columns)}", *path
                )
        return self

    @model_validator(mode="after")
    def _columns_exist(self) -> Self:
        if self.key:
            self.check_key(self.key, "key")
        for name, key in self.keys.items():
            self.check_key(key, "keys", name)
        if self.columns is not None:
            stored = self.stored_columns
            for field in map(PartitionField.parse, self.partition_by):
                if field.column not in stored:
                    raise MisplacedError(
                        f"partition_by names {field.column!r}, which is not in columns"
                        f"{did_you_mean(field.column, stored)}",
                        "partition_by",
                    )
            for name in self.cluster_by:
                if name not in stored:
                    raise MisplacedError(
                        f"cluster_by names {name!r}, which is not in columns{did_you_mean(name, stored)}", "cluster_by"
                    )
            names = (*self.columns, *self.metadata, *self.marks)
            lower = [name.lower() for name in names]
            for name in names:
                if lower.count(name.lower()) > 1:
                    raise MisplacedError(
                        f"{name!r} is a column twice in columns, metadata and soft_delete; Spark does not tell upper "
                        "from lower case",
                        "columns",
                    )
            for name in self.types:
                if name in self.columns:
                    raise MisplacedError(
                        f"types names {name!r}, whose type columns says; remove it from one of them", "types", name
                    )
            for name in self.exclude:
                if name in self.columns:
                    raise MisplacedError(
                        f"exclude names {name!r}, which columns names too; remove it from one of them", "exclude"
                    )
        return self

    def check_key(self, key: Sequence[str], *path: str) -> None:
        """Check whether these columns can be the key, as far as the configuration says.

        :param path: where the key is configured, for messages.
        :raises MisplacedError: they can't be the key.
        """
        if len(set(key)) != len(key):
            raise MisplacedError(f"key names a column twice: {list(key)}", *path)
        for name in key:
            if name in self.exclude:
                raise MisplacedError(f"exclude names {name!r}, which is in key; remove it from exclude", "exclude")
            record = self.record_columns.get(name)
            if (name in self.metadata and record is None) or record not in (None, "_source"):
                raise MisplacedError(
                    f"key names {name!r}, which is a metadata column; a key must be a field of the messages, or the "
                    "topic (_source)",
                    *path,
                )
            if self.columns is None or name in self.metadata:
                continue
            if name not in self.stored_columns:
                raise MisplacedError(
                    f"key names {name!r}, which is not in columns{did_you_mean(name, self.stored_columns)}", *path
                )
            if self.columns[name].expression is not None:
                raise MisplacedError(
                    f"key names {name!r}, which is computed; a key must be a field of the messages", *path
                )
