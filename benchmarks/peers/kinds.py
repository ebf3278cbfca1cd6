"""What the files are that a writer leaves: each byte of a change by its kind.

rowdelta's files say by their names for what they were written. Its small-file merges and its rewrites move rows, and
write the rows' new places into the key index:

    data of a micro-batch         {partition}-{task}-{operation}-{number}.parquet
    data of rows that were moved  the same, with the operation of a run of moved rows
    run of a micro-batch          {operation}-{task}-{partition}
    run of rows that were moved   {operation}-{partition}-{task}-{number}
    run of merged runs            {name}-{partition}-{task}-{number}, or {run of a micro-batch}-merged-{number}
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

_OPERATION = "[0-9a-f]{16}"
_DATA = re.compile(rf"\d+-\d+-({_OPERATION})-\d+\.parquet")
_MOVED = re.compile(rf"({_OPERATION})-\d{{5}}-\d+-\d+")
_MERGED = re.compile(r"[0-9a-f]{32}-\d+-\d+-\d+|.*-merged-\d+")


def bytes_of_kinds(files: Mapping[Path, int]) -> dict[str, int]:
    """The bytes of files by kind, the largest first.

    :param files: size of each.
    """
    moves = {found[1] for path in files if path.parent.name == "runs" and (found := _MOVED.fullmatch(path.name))}
    kinds = Counter[str]()
    for path, size in files.items():
        kinds[_kind(path, moves)] += size
    return dict(kinds.most_common())


def _kind(path: Path, moves: set[str]) -> str:
    folder, name = path.parent.name, path.name
    if folder == "runs":
        if _MERGED.fullmatch(name):
            return "key index: merged runs"
        return "key index: moved rows" if _MOVED.fullmatch(name) else "key index: changed rows"
    if folder in ("versions", "vectors"):
        return "key index: versions"
    if folder == "metadata" or "_delta_log" in path.parts:
        return "metadata"
    if name.endswith(".puffin") or name.startswith("deletion_vector") or "deletes" in name:
        return "deletes"
    if name.endswith(".parquet"):
        data = _DATA.search(name)
        return "moved rows" if data and data[1] in moves else "changed rows"
    return "checkpoint"
