"""The configuration file as a typed model, and everything that is known about its options and folders."""

from sink.config.model import Config, PartitionField, SinkSection, SourceSection, TableSection, VerifySection, load

__all__ = ["Config", "PartitionField", "SinkSection", "SourceSection", "TableSection", "VerifySection", "load"]
