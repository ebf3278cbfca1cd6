"""The changelog of the benchmarks."""

import pytest

from benchmarks.workload import Keys, Workload


@pytest.mark.parametrize("keys", ["zipf", "uniform"])
def test_a_share_of_the_events_comes_after_a_later_change_of_its_account(keys: Keys) -> None:
    workload = Workload(rows=5000, keys=keys, late=0.05)
    newest = {row["id"]: row["seq"] for part in workload.initial() for row in part.to_pylist()}
    for events, expected in ((950, 0), (1000, 50), (1000, 50)):
        changes = [row for row in workload.batch(1000).to_pylist() if row["row_kind"] != "-U"]
        late = [row for row in changes if row["seq"] < newest.get(row["id"], -1)]
        assert (len(changes), len(late)) == (events, expected)
        for row in changes:
            newest[row["id"]] = max(newest.get(row["id"], -1), row["seq"])
