"""What users of other caches ran into, case by case, and the tests that hold this cache to doing better.

Every case names its tests; each test is of the kind of failure, not of the one instance that was reported.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

# number -> (what went wrong elsewhere, "file::function" ...)
CASES: dict[int, tuple[str, ...]] = {
    1: (
        "equal structure, other constants baked in",
        "graph/test_canonical_form.py::test_attributes_count_by_type_and_by_bits",
        "plan/test_explain_flips.py::test_every_attribute_operand_and_operator_of_a_kernel",
        "plan/test_build_plan.py::test_every_part_of_a_kernel_reaches_its_lower_key",
    ),
    2: (
        "equal graph, other static shape",
        "plan/test_explain_flips.py::test_every_shape_type_role_and_layout_of_a_signature",
        "plan/test_explain_flips.py::test_a_specialization",
        "plan/test_explain_flips.py::test_a_number_of_tokens",
    ),
    3: (
        "settings that the key ignores",
        "plan/test_explain_flips.py::test_an_option_of_the_target",
        "plan/test_explain_flips.py::test_no_field_of_a_compile_is_without_its_flip",
        "plan/test_explain_flips.py::test_every_input_of_c_code_and_of_the_link",
        "toolchains/test_keys.py::test_keys_and_symbols_differ_for_every_part_of_the_target",
    ),
    4: (
        "two results under one shortened name",
        "cache/test_full_width_keys.py::test_no_part_of_a_key_and_no_other_spelling_finds_anything",
        "cache/test_full_width_keys.py::test_an_index_that_confuses_two_keys_of_one_beginning_makes_a_miss",
        "cache/test_full_width_keys.py::test_a_record_is_that_of_its_whole_key",
        "cache/test_full_width_keys.py::test_equal_keys_are_equal_fields",
        "partition/test_partition_model.py::test_equal_digests_do_not_make_two_forms_one_kernel",
    ),
    5: (
        "an input that the code generator reads and the key lacks",
        "execute/test_engine.py::test_actions_see_a_scrubbed_environment",
        "execute/test_reproducible_compiles.py::test_surroundings_change_neither_keys_nor_bytes",
    ),
    6: (
        "an environment variable that steers the split",
        "execute/test_reproducible_compiles.py::test_surroundings_change_neither_keys_nor_bytes",
        "e2e/test_moved_caches.py::test_another_machine_finds_everything_in_the_exported_cache",
    ),
    7: (
        "an old result after a tool was exchanged under its name",
        "plan/test_explain_flips.py::test_every_single_tool_file",
        "toolchains/test_keys.py::test_every_file_of_the_toolchain_that_a_compile_loads_is_in_its_key",
        "toolchains/test_keys.py::test_digests_of_tools_are_remembered_by_stat",
    ),
    8: (
        "a compiler outside of the workspace",
        "test_lock_file.py::test_every_dependency_is_locked_at_its_version_with_hashes",
        "plan/test_build_plan.py::test_every_tool_file_and_our_own_sources_reach_every_kernel",
        "toolchains/test_keys.py::test_every_file_of_the_toolchain_that_a_compile_loads_is_in_its_key",
    ),
    9: (
        "a changed parameter that is ignored",
        "plan/test_build_plan.py::test_a_pass_group_reaches_the_kernels_it_is_given_for",
        "plan/test_build_plan.py::test_a_schedule_option_reaches_only_kernels_that_use_the_schedule",
        "plan/test_build_plan.py::test_the_machine_reaches_every_kernel",
        "e2e/test_incremental_builds.py::test_a_schedule_option_compiles_only_the_kernels_it_touches",
        "e2e/test_explained_misses.py::test_a_changed_target_is_explained_before_and_recorded_after",
    ),
    10: (
        "equal shapes, other connections",
        "graph/test_canonical_form.py::test_every_other_difference_counts",
        "graph/test_canonical_form_properties.py::test_keeps_operators_attributes_wiring_and_types",
        "partition/test_partition_model.py::test_a_weight_used_twice_makes_another_kernel",
    ),
    11: (
        "a result of another configuration that fails when it runs",
        "plan/test_explain_flips.py::test_an_option_of_the_target",
        "cli/test_explain.py::test_another_shape_is_named_with_both_values",
        "cache/test_store.py::test_a_wrong_row_of_the_index_is_a_miss",
    ),
    12: (
        "paths of the user in the key",
        "e2e/test_moved_caches.py::test_another_machine_finds_everything_in_the_exported_cache",
        "toolchains/test_keys.py::test_no_path_of_the_machine_is_in_a_key",
    ),
    13: (
        "a variable of the one run in the key",
        "execute/test_reproducible_compiles.py::test_surroundings_change_neither_keys_nor_bytes",
        "execute/test_engine.py::test_actions_see_a_scrubbed_environment",
    ),
    14: (
        "names of layers in the text of a kernel",
        "graph/test_canonical_form_properties.py::test_forgets_names_and_the_order_of_independent_nodes",
        "plan/test_build_plan.py::test_names_of_nodes_reach_no_lower_key",
        "partition/test_partition_model.py::test_equal_partitions_of_all_layers_and_both_modes_are_one_kernel",
        "e2e/test_incremental_builds.py::test_more_layers_compile_nothing",
        "e2e/test_explained_misses.py::test_one_letter_of_the_names_of_nodes_costs_nothing",
    ),
    15: (
        "PATH, TMPDIR, USER, shell or the workspace's path in the key",
        "execute/test_reproducible_compiles.py::test_surroundings_change_neither_keys_nor_bytes",
        "e2e/test_moved_caches.py::test_another_machine_finds_everything_in_the_exported_cache",
        "e2e/test_shared_builds.py::test_a_machine_with_other_names_for_everything_compiles_nothing",
        "e2e/test_moved_caches.py::test_another_user_finds_everything_in_the_exported_cache",
    ),
    16: (
        "a cache that moved and never hits",
        "cache/test_archive.py::test_an_empty_cache_has_all_results_after_an_import",
        "cache/test_store.py::test_a_store_can_be_moved",
        "e2e/test_moved_caches.py::test_another_machine_finds_everything_in_the_exported_cache",
    ),
    17: (
        "the path of the output in the key",
        "e2e/test_incremental_builds.py::test_the_workspace_can_move_and_its_user_can_change",
        "link/test_bundle.py::test_two_places_give_equal_bytes",
    ),
    18: (
        "code for a CPU that the machine does not have",
        "toolchains/test_keys.py::test_native_is_a_level_and_what_the_machine_has_beyond_it",
        "toolchains/test_keys.py::test_a_cpu_without_fma_and_avx_gets_code_that_runs",
        "runtime/test_session.py::test_missing_cpu_features_are_named",
        "runtime/test_sanitizers.py::test_the_runtime_itself_names_missing_cpu_features",
    ),
    19: (
        "a hint for tuning that counts as a feature",
        "plan/test_required_features.py::test_no_schedule_option_is_a_required_feature",
        "plan/test_required_features.py::test_llvms_tuning_flags_are_no_features_of_a_target",
        "plan/test_required_features.py::test_what_is_built_for_this_machine_runs_on_it",
    ),
    20: (
        "a crash that says first that the file does not fit",
        "link/test_inspect_reads_the_header.py::test_what_is_missing_is_named_and_nothing_is_loaded",
        "link/test_inspect_reads_the_header.py::test_the_manifest_alone_is_enough",
    ),
    21: (
        "a failed compile leaves a bad entry",
        "execute/test_engine.py::test_a_bad_action_fails_alone_and_publishes_nothing",
        "execute/test_engine.py::test_a_truncated_blob_is_made_again_in_the_same_build",
        "cache/test_store.py::test_a_blob_cut_anywhere_or_with_any_bit_flipped_is_a_miss",
        "cache/test_not_files.py::test_a_blob_is_healed_by_the_build_that_finds_it",
    ),
    22: (
        "builders at the same time",
        "execute/test_engine.py::test_two_builders_at_once_agree",
        "cache/test_cases_local.py::test_builders_that_are_killed_on_one_crowded_store",
    ),
    23: (
        "files of two writers in one result",
        "cache/test_store.py::test_files_of_two_writers_are_never_mixed",
        "cache/test_cases_local.py::test_an_unreproducible_action_is_never_mixed",
    ),
    24: (
        "busy, stale and missing files of network file systems",
        "cache/test_cases_local.py::test_a_busy_or_stale_file_is_tried_again",
        "cache/test_cases_local.py::test_a_file_that_stays_unreadable_is_a_miss",
        "cache/test_not_files.py::test_in_the_place_of_any_file_of_the_store",
    ),
    25: (
        "empty and cut files",
        "cache/test_store.py::test_a_blob_cut_anywhere_or_with_any_bit_flipped_is_a_miss",
        "cache/test_store.py::test_damage_is_seen_when_a_blob_is_used",
        "cache/test_archive.py::test_an_archive_cut_at_every_block_gives_whole_results_or_none",
    ),
    26: (
        "a full disk",
        "cache/test_store.py::test_a_full_disk_costs_one_warning",
        "cache/test_cases_local.py::test_builders_that_are_killed_on_one_crowded_store",
    ),
    27: (
        "eviction under a reader",
        "cache/test_eviction.py::test_what_a_running_build_found_stays_until_it_ends",
        "cache/test_eviction.py::test_builds_keep_what_they_found_while_others_evict",
        "execute/test_engine.py::test_a_blob_that_vanishes_after_its_look_up_is_made_again",
    ),
    28: (
        "files without content after a power cut",
        "cache/test_store.py::test_a_blob_cut_anywhere_or_with_any_bit_flipped_is_a_miss",
        "cache/test_store.py::test_an_index_that_is_lost_or_damaged_is_made_again",
        "cache/test_checks.py::test_repair_makes_the_index_from_the_files",
    ),
    29: (
        "too few file handles",
        "cache/test_store.py::test_too_few_file_handles_are_misses",
        "cache/test_cases_local.py::test_a_build_with_few_file_handles_is_slower_and_right",
    ),
    30: (
        "locks of processes that are gone",
        "cache/test_eviction.py::test_a_killed_build_holds_nothing_and_leaves_no_lock",
        "cache/test_eviction.py::test_who_waits_for_an_evictor_is_told_its_process_and_host",
        "cache/test_cases_local.py::test_a_builder_that_is_stopped_holds_up_nobody",
    ),
    31: (
        "a directory that cannot be written",
        "cache/test_store.py::test_a_read_only_store_serves_look_ups_and_is_left_alone",
        "cache/test_store.py::test_a_store_that_cannot_be_made_costs_one_warning",
        "cache/test_cases_local.py::test_a_read_only_file_system_serves_look_ups",
    ),
    32: (
        "temporary files that stay, and inodes that run out",
        "cache/test_not_files.py::test_what_killed_builds_leave_goes_with_the_next_and_living_ones_keep_theirs",
        "cache/test_not_files.py::test_directories_without_a_lock_go_after_a_day",
        "cache/test_eviction.py::test_temporary_files_of_a_killed_writer_go_when_the_next_build_starts",
        "cache/test_eviction.py::test_files_are_limited_as_well_as_bytes",
        "cache/test_cases_local.py::test_temporary_files_have_one_place_and_no_build_leaves_any",
    ),
    33: (
        "names of temporary files that two hosts choose alike",
        "cache/test_temporary_names.py::test_nothing_that_two_hosts_have_in_common_is_in_a_name",
        "cache/test_temporary_names.py::test_children_of_one_process_do_not_repeat_each_other",
    ),
    34: (
        "wrong clocks and times of files",
        "cache/test_cases_local.py::test_a_wrong_clock_makes_no_stale_hit_and_no_miss",
        "e2e/test_explained_misses.py::test_a_touched_file_costs_nothing_and_a_change_under_an_old_time_is_seen",
    ),
    35: (
        "outputs that somebody changed",
        "link/test_changed_bundles.py::test_what_is_missing_or_shows_a_change_is_made_anew_by_any_build",
        "link/test_changed_bundles.py::test_every_file_that_the_build_made_is_verified",
        "link/test_changed_bundles.py::test_a_checkpoint_is_compared_by_length_and_header",
        "e2e/test_incremental_builds.py::test_generated_weights_that_somebody_changed_are_found_on_request",
    ),
    36: (
        "blanks and letters beyond ASCII in paths",
        "cli/test_build.py::test_a_dry_run_tells_what_would_run_and_runs_nothing",
        "cli/test_explain.py::test_records_are_told_and_compared",
        "e2e/test_moved_caches.py::test_another_machine_finds_everything_in_the_exported_cache",
    ),
    37: (
        "symbolic links, dangling ones too",
        "frontends/test_checkpoint_refusals.py::test_symbolic_links",
        "cache/test_cases_local.py::test_a_build_under_a_path_that_is_a_forest_of_links",
        "cache/test_cases_local.py::test_a_link_to_nowhere_in_the_place_of_the_store_costs_one_warning",
    ),
    38: (
        "a blob that is gone behind its entry",
        "cache/test_shared.py::test_a_bad_blob_behind_a_record_is_made_again_in_the_same_build_and_uploaded",
        "execute/test_engine_shared.py::test_a_blob_missing_behind_a_record_is_made_again_in_the_same_build",
        "cache/remotes/test_remote_contract.py::test_missing_blobs_are_told_and_left_out",
    ),
    39: (
        "time-outs, one for each action",
        "cache/test_shared.py::test_hanging_costs_one_time_out_however_many_wait",
        "cache/test_shared.py::test_the_first_failure_is_the_last_request",
        "execute/test_engine_shared.py::test_whatever_a_remote_does_the_build_is_right_and_warns_once",
        "e2e/test_builds_through_servers.py::test_a_second_machine_compiles_nothing_and_a_dead_server_costs_one_warning",
    ),
    40: (
        "an input that changes in the middle of a build",
        "cache/test_shared.py::test_nothing_is_uploaded_once_tools_or_sources_have_changed",
        "cache/test_unchanged.py::test_a_change_is_seen",
        "cache/remotes/test_remote_contract.py::test_a_file_that_changed_is_not_stored",
    ),
    41: (
        "untrusted builds that write",
        "cache/test_policy.py::test_uploads_of_pull_requests_are_an_administrators_to_allow",
        "cache/test_policy.py::test_a_pull_request_cannot_allow_itself_to_upload",
        "cache/test_shared.py::test_what_nobody_trusted_vouches_for_is_a_miss_with_one_alarm",
        "cache/test_signing.py::test_any_changed_byte_is_refused",
        "e2e/test_shared_builds.py::test_a_pull_request_reads_and_does_not_write",
    ),
    42: (
        "servers that limit the rate",
        "cache/test_shared.py::test_a_pause_that_a_remote_asks_for_is_honoured_once",
        "cache/test_shared.py::test_a_pause_beyond_the_time_out_is_not_waited_for",
        "cache/remotes/test_faults_http.py::test_a_server_that_asks_for_a_pause",
        "cache/remotes/test_reapi.py::test_a_busy_server_says_when_to_come_back",
    ),
    43: (
        "an archive that lacks files",
        "cache/test_archive.py::test_an_empty_cache_has_all_results_after_an_import",
        "cache/test_archive.py::test_the_verbs_move_a_cache_between_two_homes",
        "e2e/test_moved_caches.py::test_another_machine_finds_everything_in_the_exported_cache",
        "e2e/test_moved_caches.py::test_another_user_finds_everything_in_the_exported_cache",
    ),
    44: (
        "explanations that say nothing, or too much",
        "plan/test_explain_actions.py::test_the_first_difference_is_told_with_both_values",
        "plan/test_explain_record.py::test_a_record_is_bounded_whatever_the_fields_hold",
        "e2e/test_explained_misses.py::test_a_changed_target_is_explained_before_and_recorded_after",
    ),
    45: (
        "memory that runs out",
        "execute/test_ready_queue.py::test_memory_is_shared_and_smaller_ones_fill_what_is_left",
        "execute/test_ready_queue.py::test_one_that_needs_more_than_there_is_runs_with_nothing_beside_it",
        "execute/test_ready_queue.py::test_alone_waits_for_all_and_lets_none_start",
        "execute/test_resources.py::test_the_least_limit_of_all_groups_counts",
        "execute/test_failed_actions.py::test_memory_running_out_is_tried_once_more_alone",
        "execute/test_failed_actions.py::test_memory_running_out_alone_fails_with_peak_and_limit",
    ),
    46: (
        "outputs that differ from run to run",
        "e2e/test_explained_misses.py::test_a_lottery_in_the_compiler_is_found_by_its_pass_group",
        "e2e/test_moved_caches.py::test_a_sample_lowered_and_compiled_again_has_the_same_bytes",
    ),
    47: (
        "a reproducer that does not reproduce",
        "execute/test_failed_actions.py::test_a_crash_is_kept_run_once_more_and_its_pass_group_named",
        "execute/test_failed_actions.py::test_a_failure_that_did_not_come_again_is_told_and_not_remembered",
        "execute/test_failed_actions.py::test_inputs_of_a_failed_action_are_kept",
        "execute/test_once.py::test_a_crash_comes_again_with_its_pass_group_and_ir",
        "execute/test_once.py::test_one_that_fails_no_more_ends_well",
    ),
    48: (
        "upstream runs though downstream is cached",
        "e2e/test_incremental_builds.py::test_where_only_results_downstream_are_cached_nothing_is_compiled",
        "execute/test_engine.py::test_a_change_upstream_that_gives_the_same_text_stops_there",
    ),
    49: (
        "what YAML means",
        "config/test_document.py::test_message",
        "config/test_document.py::test_byte_order_mark_and_windows_line_ends_keep_places",
        "config/test_document.py::test_any_bytes_give_a_tree_or_one_message",
        "config/test_scalars.py::test_old_booleans",
        "config/test_scalars.py::test_ambiguous",
    ),
    50: (
        "a daemon that does not start",
        "cache/test_cases_local.py::test_no_daemon_is_left_and_no_port_is_opened",
    ),
    51: (
        "more processes than CPUs",
        "execute/test_usable_cpus.py::test_quotas_of_all_groups_above_count",
        "execute/test_engine.py::test_usable_cpus_follows_the_affinity_mask",
        "execute/test_engine.py::test_jobs_bounds_what_runs_at_once",
        "execute/test_jobserver.py::test_one_place_is_free_and_each_more_takes_a_token",
        "execute/test_jobserver.py::test_under_make",
    ),
    52: (
        "a warm build that is slower than one without a cache",
        "e2e/test_moved_caches.py::test_a_warm_build_is_much_faster_than_the_first",
        "e2e/test_explained_misses.py::test_a_warm_build_is_fast_records_hits_and_passes_any_hit_rate",
    ),
}


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_case_is_held_once() -> None:
    assert list(CASES) == list(range(1, 53))


@pytest.mark.parametrize("number", CASES)
def test_the_tests_of_a_case_exist(number: int) -> None:
    _, *tests = CASES[number]
    assert tests and len(set(tests)) == len(tests)
    for test in tests:
        file, _, function = test.partition("::")
        assert function in functions(file), f"{test} does not exist"
        assert function.startswith("test_")
