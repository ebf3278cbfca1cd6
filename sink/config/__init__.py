"""The configuration file as a typed model, and everything that is known about its options and folders."""

from sink.config.job_sections import DatabaseSection, SinkSection, SourceSection, VerifySection
from sink.config.load import load
from sink.config.model import Config
from sink.config.table_parts import PartitionField
from sink.config.table_section import TableSection

__all__ = [
    "Config",
    "DatabaseSection",
    "PartitionField",
    "SinkSection",
    "SourceSection",
    "TableSection",
    "VerifySection",
    "load",
]
