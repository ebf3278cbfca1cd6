"""The metrics: their values, their number, and that documents, alerts and dashboard name them as they are."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sink.sources.source import Behind, Held, Slot
from sink.table import observer
from sink.watch import metrics
from sink.watch.state import OTHERS, State
from tests.watch.story import Clock, lags, micro_batch, new_state, opened, tell

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = (PROMETHEUS / "rules.yml").read_text(encoding="utf-8")
DASHBOARD = (ROOT / "deploy" / "grafana" / "dashboards" / "rowdelta.json").read_text(encoding="utf-8")
ORDERS = "lake.shop.orders"
HISTOGRAM = "rowdelta_microbatch_seconds"


def samples(state: State) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What Prometheus reads: name and sorted labels -> value. A sample must not be there twice."""
    text = generate_latest(metrics.registry(state)).decode()
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def test_values_are_those_of_the_run() -> None:
    clock = Clock()
    state = new_state(clock)
    tell(state, opened(ORDERS, "orders"))
    tell(state, [*micro_batch(ORDERS, 1), *micro_batch(ORDERS, 2)])
    clock.now += 5
    state(lags({ORDERS: {"0": (40, 12.5), "1": (0, 0.0), "2": (9, None)}}))
    state(observer.RewriteDone(ORDERS, "minor compaction", 16, 1, 9_000, 0.5, 2.0, None, bytes_written=7_000))
    state(observer.JvmMemory(800))
    state(observer.JvmMemory(700))
    found = samples(state)

    def value(name: str, **labels: str) -> float | None:
        return found.get((f"rowdelta_{name}", tuple(sorted({"table": ORDERS, **labels}.items()))))

    def of_sink(name: str, **labels: str) -> float | None:
        return found.get((f"rowdelta_{name}", tuple(sorted(labels.items()))))

    assert value("seconds_since_last_commit") == 5
    assert value("overdue_seconds") == 0
    assert value("lag_records", topic="orders", partition="0") == 40
    assert value("lag_seconds", topic="orders", partition="0") == 12.5
    assert value("lag_records", topic="orders", partition="2") == 9
    assert value("lag_seconds", topic="orders", partition="2") is None, "not known"
    assert value("rows_total", kind="insert") == 200
    assert value("rows_total", kind="update_after") == 6
    assert value("commits_total") == 2
    assert value("commit_attempts_total") == 4
    assert value("commit_refusals_total", reason="conflict") == 2
    assert value("stage_seconds_total", stage="write") == 4
    assert value("written_files_total", content="position_deletes") == 2
    assert value("written_bytes_total", content="data") == 10_000
    assert value("dead_letters_total", error_class="type_mismatch") == 2
    assert value("index_bytes") == 48_000
    assert value("index_probe_seconds_total") == 0.25
    assert value("rewrite_files_seen_total", kind="minor_compaction") == 26
    assert value("rewrite_files_touched_total", kind="minor_compaction") == 16
    assert value("rewrite_seconds_total", kind="minor_compaction") == 2
    assert value("rewrite_bytes_total", kind="minor_compaction") == 9_000
    assert value("rewrite_bytes_written_total", kind="minor_compaction") == 7_000
    assert value("lag_files") is None
    assert of_sink("memory_peak_bytes", process="jvm") == 800
    assert of_sink("memory_peak_bytes", process="worker") == 512_000_000
    assert of_sink("tables", status="working") == 1
    assert of_sink("ready") == of_sink("live") == of_sink("lag_known") == 1
    assert of_sink(f"{HISTOGRAM.removeprefix('rowdelta_')}_count") == 2
    assert of_sink(f"{HISTOGRAM.removeprefix('rowdelta_')}_bucket", le="5") == 2
    assert of_sink("info", sink="shop", version="1.2.3") == 1


def test_the_engine_and_the_slots_of_the_database_are_seen() -> None:
    clock = Clock()
    state = new_state(clock)
    seen = observer.EngineSeen(True, 2, "", Held(30, 4_000, int((state._wall() - 5) * 1000)))
    idle = Slot("old", False, 7_000_000, 6_000_000, "extended", None)
    tell(state, [seen, observer.SlotsSeen([Slot("shop", True, 900, 20, "reserved", None), idle])])
    found = {(name, *dict(labels).values()): value for (name, labels), value in samples(state).items()}
    assert found["rowdelta_engine_reading",] == 1
    assert found["rowdelta_engine_failures_total",] == 2
    assert found["rowdelta_engine_last_event_seconds",] == pytest.approx(5)
    assert (found["rowdelta_buffer_events",], found["rowdelta_buffer_bytes",]) == (30, 4_000)
    assert (found["rowdelta_slot_active", "shop"], found["rowdelta_slot_active", "old"]) == (1, 0)
    assert found["rowdelta_slot_retained_bytes", "old"] == 7_000_000
    assert found["rowdelta_slot_unread_bytes", "shop"] == 20
    summary = state.summary()
    assert summary["engine"]["since_event"] == 5
    assert [slot["name"] for slot in summary["slots"]] == ["shop", "old"]
    reason = "Debezium's engine has ended: postgresql://u:planted@db refuses it"
    tell(state, [replace(seen, is_reading=False, reason=reason), observer.SlotsSeen((), reason)])
    summary = state.summary()
    assert "planted" not in json.dumps(summary)
    assert summary["engine"]["reason"] == summary["slots_unknown"] == reason.replace("u:planted", "****")
    assert "rowdelta_slot_active" not in {name for name, _ in samples(state)}


def test_files_of_a_directory_have_metrics_of_their_own() -> None:
    state = new_state(Clock())
    tell(state, opened(ORDERS, "/changes/orders"))
    state(observer.Lags({ORDERS: {"": Behind(3, 70.0)}}, "files"))
    found = {name: value for (name, _), value in samples(state).items()}
    assert (found["rowdelta_lag_files"], found["rowdelta_lag_oldest_file_seconds"]) == (3, 70)
    assert "rowdelta_lag_records" not in found


def test_a_thousand_tables_of_many_partitions_make_a_bounded_number_of_series() -> None:
    state = new_state(Clock())
    behind: dict[str, dict[str, tuple[int, float | None]]] = {}
    for number in range(1_000):
        name = f"lake.shop.t{number}"
        tell(state, [*opened(name, f"t{number}"), *micro_batch(name, 1)])
        behind[name] = {str(part): (1, float(number)) for part in range(12)}
    state(lags(behind))
    found = samples(state)
    assert len(found) < 32_000
    assert sum(value for (name, _), value in found.items() if name == "rowdelta_lag_records") == 12_000
    assert found["rowdelta_commits_total", (("table", OTHERS),)] == 500
    others = (("partition", OTHERS), ("table", OTHERS), ("topic", OTHERS))
    assert found["rowdelta_lag_seconds", others] == 999, "the highest"


def test_hostile_names_are_labels_and_nothing_else() -> None:
    names = ['a"b\\c\nd{}', "x" * 5_000, "x" * 5_001, "schönes 表", 'http://u:planted@h/"} 1\nrowdelta_ready 7']
    state = new_state(Clock())
    for name in names:
        tell(state, [*opened(name, name), *micro_batch(name, 1)])
    state(lags({name: {"0": (1, 1.0)} for name in names}))
    found = samples(state)  # which also says that no two long names are one series
    tables = {dict(labels)["table"] for name, labels in found if name == "rowdelta_commits_total"}
    assert len(tables) == 5
    assert {names[0], names[3]} <= tables
    assert all(len(table) < 400 and "planted" not in table for table in tables)
    assert found["rowdelta_ready", ()] == 1


# What is written about them


def documented() -> dict[str, str]:
    """Metric -> the row of the page's table."""
    return dict(re.findall(r"^\| `(rowdelta_\w+)`(.*)$", PAGE, re.MULTILINE))


def known() -> list[str]:
    families = metrics.registry(new_state(Clock())).collect()
    return [f"{family.name}_total" if family.type == "counter" else family.name for family in families]


def test_the_page_lists_each_metric_and_no_other() -> None:
    assert list(documented()) == known()


@pytest.mark.parametrize("metric", metrics.OF_TABLES, ids=lambda metric: metric.name)
def test_the_page_names_each_label(metric: metrics.OfTable) -> None:
    row = documented()[f"{metric.name}_total" if metric.kind == "counter" else metric.name]
    _, labels, kind, *_ = row.split("|")
    assert re.findall(r"\w+", labels) == ["table", *metric.labels]
    assert kind.strip() == metric.kind


def test_names_are_as_prometheus_wants_them() -> None:
    for metric in metrics.OF_TABLES:
        assert re.fullmatch(r"rowdelta_[a-z_]+", metric.name)
        assert not re.search(r"_(total|count|sum|ms|milliseconds|minutes|mb|kb)$", metric.name)


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD)
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [variable["query"]["query"] for variable in dashboard["templating"]["list"]]
    return [*(rule["expr"] for rule in rules()), *targets, *queries]


def test_alerts_and_dashboard_name_metrics_and_labels_that_exist() -> None:
    parts = {f"{HISTOGRAM}_{part}" for part in ("bucket", "count", "sum")}
    label_names = {label for metric in metrics.OF_TABLES for label in metric.labels}
    label_names |= {"table", "sink", "status", "process", "le", "instance", "job"}
    found = expressions()
    assert len(found) > 20
    for expression in found:
        named = set(re.findall(r"\browdelta_\w+", expression))
        assert named, expression
        assert named <= {*known(), *parts}, expression
        by = re.findall(r"\b(?:by|on|ignoring|without|group_left)\s*\(([^)]*)\)", expression)
        used = {label.strip() for labels in by for label in labels.split(",") if label.strip()}
        used |= set(re.findall(r"[{,]\s*(\w+)\s*[=!]", expression))
        assert used <= label_names, expression


def test_each_alert_says_what_is_wrong_and_is_on_the_page() -> None:
    alerts = {rule["alert"]: rule for rule in rules()}
    assert len(alerts) == len(rules())
    for name, rule in alerts.items():
        assert f"`{name}`" in PAGE, name
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
    named = set(re.findall(r"`(Rowdelta\w+)`", PAGE))
    assert named == set(alerts)


@pytest.mark.skipif(
    shutil.which("promtool") is None and "CI" not in os.environ,
    reason="no promtool found; Debian and Ubuntu: apt install prometheus",
)
def test_prometheus_takes_the_rules_and_alerts_when_it_should() -> None:
    for arguments in (
        ["check", "config", str(PROMETHEUS / "prometheus.yml")],
        ["test", "rules", str(ROOT / "tests" / "watch" / "rules_test.yml")],
    ):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_the_rules_and_scrapes_the_sink() -> None:
    configuration = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    assert configuration["rule_files"] == ["rules.yml"]
    (job,) = configuration["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["sink:8088"]}]


def test_grafana_is_provisioned_with_the_dashboard_and_its_source() -> None:
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "rowdelta.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    dashboard = json.loads(DASHBOARD)
    used = {panel["datasource"]["uid"] for panel in dashboard["panels"] if "datasource" in panel}
    assert used == {source["uid"]}
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)
