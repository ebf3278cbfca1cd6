"""Which tests `make test`, `make test-all` and `make test-nightly` run: pytest's option `--tier`.

A test that needs neither a JVM nor a server belongs to `test`. Of the others, `test` has those of `PROOF`: the whole
promise once, one combination for each fact. `NIGHTLY` is what only a change of certain files can break, or takes very
long. All else belongs to `all`. Without the option, pytest runs what it is told to, whatever the tier.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast, get_args

import pytest

Tier = Literal["test", "all", "nightly"]

PROOF: Mapping[str, Sequence[str]] = {
    # the way of a row
    "sink/test_shared_topic.py": [
        "each_entry_takes_its_table_and_goes_on_from_its_own_position[iceberg]",
        "a_pattern_finds_the_tables_that_messages_name",
    ],
    "sink/test_many_topics.py": ["equal_keys_of_two_topics_are_two_rows_also_after_crashes"],
    "sink/test_catalogs.py": [
        "table_equals_source[hadoop-unpartitioned-position-2]",
        "table_equals_source[hadoop-region-position-3]",
        "table_equals_source[hadoop-bucket-equality-2]",
        "table_equals_source[jdbc-region-position-3]",
    ],
    "delta/test_target.py": [
        "changes_over_several_micro_batches",
        "a_file_whose_rows_are_all_deleted_is_removed",
        "a_vector_grows",
        "a_micro_batch_without_effect",
        "mode_append",
        "lost_checkpoint",
        "small_files_are_merged",
    ],
    "sink/test_copy_on_write.py": ["the_table_never_gets_a_delete_file[partition_by1-3]", "others_commit_meanwhile[3]"],
    "delta/test_copy_on_write.py": ["the_table_never_gets_a_vector[partition_by0]"],
    "sink/test_append.py": ["each_insert_is_there_once_after_a_crash[before the commit]", "from_kafka"],
    "sink/test_order.py": ["any_order_of_arrival_ends_in_the_same_row[0]", "ties_are_broken_by_the_offset"],
    "sink/test_late.py": ["late_changes_are_dropped[v3]", "late_changes_are_dropped[delta]", "partitions_are_added"],
    "sink/test_versions.py": ["each_change_makes_a_version[v3]", "each_change_makes_a_version[delta]"],
    "sink/test_soft_delete.py": ["a_delete_marks_the_row[v3]", "a_delete_marks_the_row[delta]"],
    "sink/test_where.py": ["rows_enter_and_leave[iceberg-python]", "rows_enter_and_leave[delta-spark]"],
    "sink/test_conditions.py": ["python_evaluates_comparisons"],
    "sink/test_null_updates.py": ["a_null_keeps_the_value_of_the_keys_row[iceberg]"],
    "sink/test_hide_and_hash.py": ["what_is_hidden_is_nowhere[Job-0]"],
    "sink/test_truncate.py": ["what_came_before_is_gone_and_what_came_after_stays[v3]"],
    "delta/test_truncate.py": ["what_came_before_is_gone_and_what_came_after_stays"],
    "sink/test_partial_updates.py": ["unchanged_toast_values_are_kept[3]"],
    "delta/test_partial_updates.py": ["unchanged_toast_values_are_kept"],
    "sink/test_moved_keys.py": ["all_rows_stay[kinds0-3-upsert-position]", "halves_in_different_partitions"],
    "delta/test_moved_keys.py": ["all_rows_stay"],
    "sink/test_source_tables.py": ["the_first_table_is_taken_and_remembered"],
    "sink/test_defaults.py": ["*"],
    # no broker
    "sink/test_debezium_source.py": [
        "available_now_applies_what_the_database_has_at_its_start",
        "events_with_one_position_in_the_log_are_in_the_buffer_once",
    ],
    "sink/test_mirror.py": [
        "what_init_writes_of_a_database_mirrors_it",
    ],
    # a real broker
    "sink/test_kafka.py": [
        "table_equals_source_over_restarts[upsert]",
        "real_messages_into_two_tables",
        "row_kind_messages",
        "aborted_transactions_are_left_out",
        "latest_means_the_first_start",
        "new_partitions_are_read_from_their_start",
        "a_topic_created_anew_is_refused",
        "messages_that_are_gone_are_not_skipped_silently",
        "a_new_snapshot_of_the_source_needs_upsert",
        "stop_finishes_the_micro_batch",
    ],
    "sink/test_keys.py": ["one_pattern_mirrors_a_whole_database[False]", "a_primary_key_that_changes_stops_the_table"],
    "sink/test_avro.py": ["table_equals_source_across_a_schema_change"],
    "sink/test_many_tables.py": ["one_bad_table_does_not_stop_the_others", "new_topics_are_picked_up_while_running"],
    "delta/test_many_tables.py": ["a_table_that_comes_later"],
    "sink/test_files_source.py": [
        "a_directory_that_was_moved_is_refused_and_not_applied_again",
        "files_of_one_time_are_applied_by_their_paths[checkpoint lost-json]",
        "rows_of_one_order_value_are_applied_as_they_are_in_files[parquet-arrow-position]",
    ],
    # a kill, a second driver, a lost answer: each change once
    "sink/test_commits.py": [
        "a_finished_job_run_again_applies_nothing[upsert-position-v3]",
        "a_batch_committed_before_the_crash_is_not_applied_again",
        "a_late_file_is_not_lost_while_the_checkpoint_lives",
        "a_second_driver_is_refused_and_nothing_is_applied_twice",
        "a_driver_that_overslept_is_refused[position-v3]",
        "after_an_unknown_commit_state_the_table_is_asked[True",
        "a_commit_that_landed_and_was_reported_as_failed",
        "after_a_rollback_the_sink_goes_on_from_that_snapshots_position[upsert-1-position-v3]",
        "a_rollback_while_the_sink_runs[position-v3]",
        "a_table_dropped_and_created_again_underneath[position-v3]",
        "a_dead_process_leaves_files_and_no_harm",
        "a_failed_job_leaves_no_files[position-v3]",
        # foreign writers
        "two_sinks_with_their_own_ids_share_a_table[position-v3]",
        "a_foreign_append_between_write_and_commit_is_survived[position-v3]",
        "a_foreign_compaction_between_write_and_commit_is_not_in_the_way[position-v3]",
        "a_busy_foreign_writer_does_not_starve_the_sink[position-v3]",
        "a_table_repartitioned_between_write_and_commit[position-v3-rewritten]",
        "a_table_that_becomes_v3_between_write_and_commit[position]",
        "expired_snapshots_take_no_position_with_them",
    ],
    "sink/test_commit_faults.py": ["another_version_between_staging_and_sending"],
    "delta/test_faults.py": [
        "a_crash_applies_nothing_twice[before the commit]",
        "a_crash_applies_nothing_twice[after the commit]",
        "commits_of_unknown_outcome",
        "a_second_driver_is_fenced",
        "the_index_is_built_again",
    ],
    "delta/test_foreign_writers.py": [
        "others_commit_between_look_up_and_commit[in the commit-partition_by1]",
        "restore_takes_the_position_back",
        "vacuum_and_log_clean_up",
    ],
    "delta/test_log.py": [
        "a_table_is_created_as_delta_creates_one",
        "a_commit_is_read_back",
        "foreign_changes_refuse_ours",
        "an_answer_that_is_lost",
        "delta_doubles_rows_if_a_remove_doesnt_name_the_vector",
        "columns_are_added_and_widened",
    ],
    "delta/test_writers.py": ["delta_reads_the_vectors", "vectors_of_deltas_own_writer_are_read"],
    "sink/test_metrics.py": ["column_metrics_equal_those_of_icebergs_writer"],
    "sink/test_submit.py": ["killed_at_once_and_started_again"],
    "delta/test_versions.py": ["the_whole_way[partition_by]"],
    # the key index
    "sink/test_key_index.py": [
        "an_insert_of_an_unknown_key_writes_no_delete[v3]",
        "an_insert_of_a_known_key_is_an_upsert[v2]",
        "a_delete_of_an_unknown_key_is_a_counted_no_op[v3]",
        "duplicates_of_others_are_all_deleted_on_the_keys_next_change[v3]",
        "v3_has_one_deletion_vector_a_data_file_united_with_the_one_before",
        "v2_has_one_delete_file_for_all_tasks_of_a_commit[partition_by0]",
        "position_deletes_of_v2_go_on_as_vectors_when_the_table_is_upgraded[driver]",
        "keys_are_looked_up_again_when_others_moved_their_rows_before_the_commit[v3-compaction]",
        "the_index_follows_others_without_being_built_again[v3]",
        "a_damaged_index_is_built_again[v3-runs]",
        "after_a_rollback_the_index_is_that_of_the_older_table[v3]",
    ],
    # schema changes
    "sink/test_schema_changes.py": [
        "a_new_column_in_the_middle_of_a_micro_batch[position-3]",
        "wider_values[position-3]",
        "a_partition_column_grows",
        "a_type_that_the_column_cannot_become_is_a_bad_record",
        "a_new_field_inside_a_struct",
        "a_crash_after_evolving[position]",
        "ignore",
        "files_with_more_and_wider_columns[position-3-True]",
    ],
    "sink/test_schema_changes_kafka.py": ["an_envelope_changes_in_the_middle_of_a_micro_batch[position]"],
    # bad records
    "sink/test_bad_input.py": [
        "each_bad_record_goes_to_the_dead_letters_with_its_reason",
        "a_bad_record_stops_the_job_if_so_configured",
        "bad_rows_of_parquet_files",
        "dead_letters_are_kept_exactly_once_through_a_crash",
        "a_file_that_vanished_is_no_silent_loss[after its micro-batch was planned-parquet]",
    ],
    "sink/test_dead_letters.py": [
        "list_and_counts",
        "replay_applies_what_was_refused_but_undoes_nothing_newer[position-upsert]",
        "a_crash_of_replay_neither_loses_nor_repeats[after the commit-position]",
    ],
    "delta/test_dead_letters.py": ["a_bad_record_is_kept_once_also_after_a_crash"],
    # maintenance
    "sink/test_minor_compaction.py": [
        "small_files_are_merged[True-partition_by0-3]",
        "others_commit_meanwhile[delete-3]",
        "a_crash[after a rewrite-2]",
    ],
    "sink/test_rewriting.py": [
        "rows_change_while_their_files_are_rewritten[partition_by0-3]",
        "a_crash_around_the_commit[after a rewrite]",
        "delete_files_are_merged_and_data_files_stay[2]",
    ],
    "delta/test_rewriting.py": ["a_crash_around_the_commit"],
    "sink/test_maintenance.py": [
        "a_running_job_rewrites_files",
        "expiry_keeps_the_snapshot_of_the_position",
        "files_of_a_commit_that_is_still_to_come_are_no_orphans",
        "equality_deletes_become_deletes_by_position[partition_by1-3]",
    ],
    # what users see
    "sink/test_pipeline.py": ["a_failure_of_one_table_ends_the_job", "what_failed_in_a_task_is_said"],
    "sink/test_verify.py": ["each_difference_of_random_rows_is_found_and_no_other"],
    "sink/test_time_travel.py": ["rows_as_they_were"],
    "sink/test_stored_key.py": ["another_key_is_refused_until_the_user_says_so"],
    "sink/test_reset.py": ["the_source_is_read_again[True-v3]"],
    "sink/test_redaction.py": ["*"],
}
"""File -> beginnings of its tests' names (without `test_`); `*` is all of them."""

NEEDS_MORE = (
    "benchmarks/test_htap.py",
    "benchmarks/test_peers.py",
    "benchmarks/test_soak.py",
    "sink/test_readers.py",
    "test_deploy.py",
    "watch/test_page.py",
)
"""Files that import what only the extra `test-all` has: none of their tests belongs to `test`."""

NIGHTLY: Mapping[str, Sequence[str]] = {
    # the oracle of Delta's log, tested itself
    "delta/test_log_model.py": ["a_broken_rule_is_found", "the_model_reads_what_delta_reads"],
    # the stories, tested themselves
    "memory/test_history.py": ["stories_of_history_find_a_mistake"],
    "memory/test_late.py": ["late_stories_find_a_mistake"],
    "memory/test_soft.py": ["soft_stories_find_a_mistake"],
    "memory/test_stories.py": ["stories_find_a_mistake"],
    # further ways of a fault of which `make test-all` has one
    "delta/test_foreign_writers.py": [
        "others_commit_between_look_up_and_commit[before",
        "a_busy_writer_does_not_starve",
    ],
    "delta/test_versions.py": ["the_whole_way[cluster_by]"],
    "sink/test_mirror.py": ["a_database_is_mirrored_while_it_changes_and_both_are_killed"],
    "faults/test_connect.py": ["*"],
    "faults/test_executors.py": ["*"],
    "faults/test_machine.py": ["a_full_disk"],
    "faults/test_processes.py": [
        "two_drivers",
        "a_signal",
    ],
    "faults/test_servers.py": [
        "all_brokers_hang",
        "the_leader_changes",
        "messages_expire",
        "messages_come_again",
        "small_files_are_not_found",
        "the_indexes_are_not_found",
        "the_registry_fails",
        "the_catalog_fails[409]",
        "the_catalog_fails[500",
        "the_catalog_fails[502",
        "the_catalog_fails[503]",
        "the_catalog_fails[timeout]",
        "the_store_fails[50",
        "the_store_fails[slow]",
        "the_store_fails[upload]",
        "the_store_fails_to_read",
        "the_checkpoint_in_the_bucket[503-500]",
        "the_checkpoint_in_the_bucket[timeout]",
    ],
    "sink/test_submit.py": [
        "a_signal_finishes_the_micro_batch[SIGTERM to the group]",
        "a_second_ctrl_c_interrupts[spark-submit]",
        "a_signal_during_the_start[the JVM is launched-SIGTERM",
        "a_signal_during_the_start[Spark starts-Ctrl-C]",
        "a_signal_during_the_start[Spark starts-SIGTERM]",
    ],
    # further combinations of what `tests/memory` plays with each driver, and `make test-all` with one
    "sink/test_first_contact.py": [
        "check_at_each_window[debezium-json",
        "check_at_each_window[debezium-avro-entry1]",
    ],
    "sink/test_amoro.py": [
        "what_amoro_commits[data files-equality",
        "what_amoro_commits[data files and",
        "what_amoro_commits[deletes-",
        "what_amoro_commits[dangling",
        "what_amoro_commits[more",
    ],
    "sink/test_minor_compaction.py": [
        "small_files_are_merged[False",
        "others_commit_meanwhile[append-",
        "another_run_commits_meanwhile[False",
        "rows_of_a_partition_become_files_of_the_usual_size[False",
        "not_before_there_are_enough_files[3",
    ],
    "sink/test_partitions_of_deletes.py": ["files_of_a_spec_by_floats_that_others_left"],
    # random stories with Spark: those of `tests/memory` come first
    "delta/test_properties.py": ["*"],
    "sink/test_properties.py": ["the_table_equals_the_source"],
    # `test_package.py` runs the demo, and many jobs have both formats
    "test_demo.py": ["the_demo_proves_its_tables_and_can_be_run_again"],
    "delta/test_session.py": ["a_session_with_both_formats"],
    "sink/test_zip_bomb.py": ["*"],
    # programs beside us that take a minute to start: a cluster, a metastore, Flink, a catalog that wants signatures
    "sink/test_cluster.py": ["a_cluster_that_shares_no_folder"],
    "delta/test_session_catalog.py": ["*"],
    "sink/test_flink.py": ["*"],
    "stack/test_sigv4.py": ["*"],
    # MariaDB's connector tells nobody how far it is, so each round waits
    "sink/test_reconcile.py": ["beside_a_run_while_the_source_changes[mariadb"],
    "stack/test_demo_database.py": ["*"],
    "sink/test_mysql_mirror.py": [
        "a_database_is_mirrored_while_it_changes_and_is_altered_and_both_are_killed",
        "reconcile_starts_the_engine",
    ],
    "sink/test_load.py": ["a_loaded_table_is_equal_after_kills_while_the_source_changes[mariadb"],
    "stack/test_load_replay.py": ["*"],
    "stack/test_demo_stack.py": ["nothing_runs_after_ctrl_c[Postgres after"],
    # processes that race for each version of a log
    "delta/test_log.py": ["two_processes_at_once", "foreign_changes_in_another_partition_refuse_ours"],
    # a benchmark, and a soak of 300 micro-batches
    "sink/test_requests.py": ["*"],
    "benchmarks/test_peers.py": ["a_case_is_measured"],
    "benchmarks/test_soak.py": ["a_short_soak_ends_with_tables_that_equal_the_source"],
}
"""As `PROOF`."""

BEYOND = (
    "Beyond these, `make test-all` has all combinations of format, mode and partitioning; processes and signals; "
    "faults of servers and stores; databases with Debezium; other readers; the oldest Spark."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=get_args(Tier), help="run the tests of one `make` target only (tests/tiers.py)")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what can't be imported where only the extra `test` is installed."""
    needs_more = collection_path.as_posix().endswith(NEEDS_MORE)
    return True if needs_more and find_spec("chdb") is None else None


def tier_of(item: pytest.Item) -> Tier:
    if _entries(NIGHTLY, item):
        return "nightly"
    file, _ = _file_and_name(item)
    needs_more = file in NEEDS_MORE or any(item.get_closest_marker(mark) for mark in ("spark", "kafka", "long"))
    return "test" if not needs_more or _entries(PROOF, item) else "all"


def _file_and_name(item: pytest.Item) -> tuple[str, str]:
    file, _, name = item.nodeid.removeprefix("tests/").partition("::")
    return file, name.removeprefix("test_")


def _entries(chosen: Mapping[str, Sequence[str]], item: pytest.Item) -> list[tuple[str, str]]:
    """The entries that a test is named by."""
    file, name = _file_and_name(item)
    return [(file, start) for start in chosen.get(file, ()) if start == "*" or name.startswith(start)]


@pytest.hookimpl(tryfirst=True)  # before `-m` and `-k` take items away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = cast(Tier | None, config.getoption("--tier"))
    if chosen is None:
        return
    if not any("::" in argument for argument in config.args):
        files = {_file_and_name(item)[0] for item in items}
        for among in (PROOF, NIGHTLY):
            named = {entry for item in items for entry in _entries(among, item)}
            unknown = {(file, start) for file in files for start in among.get(file, ())} - named
            if unknown:
                raise pytest.UsageError(f"tests/tiers.py names tests that don't exist: {sorted(unknown)}")
    tiers = {item: tier_of(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if tiers[item] != chosen])
    items[:] = [item for item in items if tiers[item] == chosen]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--tier") == "test":
        terminalreporter.write_line(BEYOND)
