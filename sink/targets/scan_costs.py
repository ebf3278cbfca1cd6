"""What a scan pays for, by format, as Spark's readers are: `python -m benchmarks.scans` measures and fits it.

All costs are in bytes that a scan could read in the same time, so that what is saved can be compared with what is
written.
"""

from dataclasses import dataclass

from sink.targets.upkeep_values import Rewritable

_MB = 1024 * 1024


@dataclass(frozen=True)
class ScanCosts:
    """:param once: to plan a scan, and to run it.
    :param file: to open a data file.
    :param with_deletes: more, if rows of it are deleted. Iceberg's reader waits then in version 2.
    :param filtered: more for each byte of such a file.
    :param delete_file: for each delete file that applies to a data file.
    """

    once: int
    file: int
    with_deletes: int
    filtered: float
    delete_file: int

    def of(self, file: Rewritable) -> float:
        """To read a data file."""
        size = file.file.size_in_bytes
        deletes = self.with_deletes + self.filtered * size + self.delete_file * file.deletes if file.deletes else 0
        return self.file + size + deletes


# between what they are in a scan of all columns and in one of one column
V2 = ScanCosts(once=16 * _MB, file=int(0.6 * _MB), with_deletes=4 * _MB, filtered=0.2, delete_file=int(0.1 * _MB))
V3 = ScanCosts(once=16 * _MB, file=int(0.6 * _MB), with_deletes=_MB, filtered=0.15, delete_file=0)
DELTA = ScanCosts(once=32 * _MB, file=int(0.6 * _MB), with_deletes=int(0.2 * _MB), filtered=0.4, delete_file=0)
