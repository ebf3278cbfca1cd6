"""The configuration file as a typed model, and everything that is known about its options and folders."""

from sink.config.model import RESERVED, Config, PartitionField, SourceSection, TableSection, load

__all__ = ["RESERVED", "Config", "PartitionField", "SourceSection", "TableSection", "load"]
