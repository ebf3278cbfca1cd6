"""Scala's objects and collections, and Delta's classes, by py4j. It knows nothing of the sink."""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from py4j.java_gateway import JavaObject, is_instance_of
from pyspark.sql import SparkSession

from sink.spark.java_errors import JAVA_ERRORS, java_exception

DELTA = "org.apache.spark.sql.delta"
_SQL_METRICS = "org.apache.spark.sql.execution.metric.SQLMetrics"


class Scala:
    """Makes what calls of Scala's methods need.

    :param spark: a session with Delta's jars.
    """

    def __init__(self, spark: SparkSession) -> None:
        jvm: Any = spark._jvm
        self.jvm = jvm
        self._spark = spark
        self._gateway = spark.sparkContext._gateway
        # Each step of a name such as `a.b.c` is a call to the JVM, so classes are looked up once.
        self.none = jvm.scala.Option.empty()
        self.some = jvm.scala.Option.apply
        self.array_list = jvm.java.util.ArrayList
        self.hash_map = jvm.java.util.HashMap
        self._python_utils = jvm.PythonUtils

    @cached_property
    def mapper(self) -> JavaObject:
        """Delta's own, from Jackson."""
        return self.object("util.JsonUtils").mapper()

    def object(self, name: str) -> JavaObject:
        """One of Delta's singletons."""
        return getattr(getattr(self.jvm, f"{DELTA}.{name}$"), "MODULE$")

    def type(self, name: str) -> JavaObject:
        """One of Delta's classes."""
        return getattr(self.jvm, f"{DELTA}.{name}")

    def action(self, action: Mapping[str, Any]) -> JavaObject:
        """Delta's object of an action."""
        return self.object("actions.Action").fromJson(json.dumps(action))

    def to_seq(self, items: JavaObject) -> JavaObject:
        return self._python_utils.toSeq(items)

    def to_map(self, values: JavaObject) -> JavaObject:
        return self._python_utils.toScalaMap(values)

    def map_of(self, entries: Mapping[str, str]) -> JavaObject:
        values = self.hash_map()
        for key, value in entries.items():
            values.put(key, value)
        return self.to_map(values)

    def set_of(self, element: JavaObject) -> JavaObject:
        """A Scala set is also the function that says whether something is in it."""
        empty = getattr(getattr(self.jvm, "scala.collection.immutable.Set$"), "MODULE$").empty()
        return getattr(empty, "$plus")(element)

    def list_type(self, element: str, of: JavaObject) -> JavaObject:
        """Jackson's type of a list. Reading a whole list takes one call, where `Action.fromJson` takes one a file.

        :param of: an object of Delta's, whose class loader knows the element's class.
        """
        element_class = self.jvm.java.lang.Class.forName(element, True, of.getClass().getClassLoader())
        return self.mapper.getTypeFactory().constructCollectionType(self.array_list().getClass(), element_class)

    def is_a(self, error: Exception, java_type: str) -> bool:
        """Whether Java's error is of a class, or of one that extends it."""
        return bool(is_instance_of(self._gateway, java_exception(error), java_type))

    def is_check(self, error: Exception) -> bool:
        """Whether Delta refuses what it was asked for. It does so before it writes anything."""
        kinds = (f"{DELTA}.DeltaThrowable", "org.apache.spark.sql.AnalysisException")
        return any(self.is_a(error, kind) for kind in kinds)

    def show_metrics(self, transaction: JavaObject, operation: JavaObject, metrics: Mapping[str, int]) -> None:
        """Have `DESCRIBE HISTORY` show numbers of a commit.

        :param operation: Delta's `StreamingUpdate`.
        """
        create, values = getattr(self.jvm, _SQL_METRICS).createMetric, self.hash_map()
        for name, value in metrics.items():
            metric = create(self._spark.sparkContext._jsc.sc(), name)
            metric.set(value)
            values.put(name, metric)
        shown = self.to_map(values)
        transaction.registerSQLMetrics(self._spark._jsparkSession, shown)
        # Delta shows four metrics of a streaming update and drops others, so the operation is told to show ours. If a
        # later JVM forbids it, these four are left.
        with suppress(*JAVA_ERRORS):
            names = operation.getClass().getDeclaredField("operationMetrics")
            names.setAccessible(True)
            names.set(operation, shown.keySet())
