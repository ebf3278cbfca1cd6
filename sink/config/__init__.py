"""The configuration file as a typed model, and everything that is known about its options and folders."""

from sink.config.load import load
from sink.config.model import Config
from sink.config.sections import PartitionField, SinkSection, SourceSection, TableSection, VerifySection

__all__ = ["Config", "PartitionField", "SinkSection", "SourceSection", "TableSection", "VerifySection", "load"]
