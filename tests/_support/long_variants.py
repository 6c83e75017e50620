"""Tests that are `long` by their names: most are variants, of which others run always.

They were chosen from a measurement of the suite on a slow machine, where each takes 5 to 96
seconds of CPU time; together a quarter of all.
`tests/test_long_variants.py` checks that they exist.
"""

LONG_VARIANTS = frozenset(
    {
        # The whole of a server with two workers, and of a second Ray with servers and workers.
        "vllm/test_vllm_contract.py::test_two_workers_keep_the_contract[short]",
        "distributed/test_cluster_runs.py::test_ray_servers_and_workers_are_restarted[adapters]",
        "distributed/test_object_store.py::test_no_weights_are_in_the_object_store",
        "examples/test_cluster_examples.py::test_slurm_script_trains_on_two_nodes",
        "distributed/test_placement.py::test_replicas_are_placed_by_node",
        "distributed/test_rollout_workers.py::test_env_errors_are_raised_in_the_driver",
        "distributed/test_rollout_workers.py::test_tokens_carry_the_version_that_sampled_them",
        "sglang/test_cluster_serving.py::test_run_over_servers_placed_by_ray[fake-True]",
        # Served runs: another channel or kind of server runs always.
        "sglang/test_runs.py::test_run_over_a_server[fake-disk]",
        "sglang/test_runs.py::test_run_over_a_server[fake-distributed]",
        "sglang/test_runs.py::test_run_over_a_server[real-tensor]",
        "sglang/test_sleeping_servers.py::test_run_with_servers_and_trainer_in_turns[fake-extra0]",
        "sglang/test_sleeping_servers.py::test_run_with_servers_and_trainer_in_turns[real-extra2]",
        "sglang/test_sglang_contract.py::test_sglang_keeps_the_contract[real-updates-in-flight-abort]",
        "vllm/test_vllm_contract.py::test_vllm_keeps_the_contract[real-updates-in-flight-abort]",
        "vllm/test_vllm_contract.py::test_vllm_keeps_the_contract[real-cancelling-abort]",
        "vllm/test_vllm_contract.py::test_vllm_keeps_the_contract[real-publication-keep]",
        "vllm/test_vllm_contract.py::test_vllm_keeps_the_contract[real-sleep-abort]",
        "vllm/test_vllm_contract.py::test_vllm_keeps_the_contract[real-refused-weights-abort]",
        "vllm/test_vllm_contract.py::test_vllm_keeps_the_contract[real-streams-abort]",
        "sglang/test_sglang_contract.py::test_sglang_keeps_the_contract[real-publication-abort]",
        "sglang/test_sglang_contract.py::test_sglang_keeps_the_contract[real-sleep-abort]",
        "sglang/test_runs.py::test_run_over_a_server[real-distributed]",
        "sglang/test_runs.py::test_server_with_another_model_is_refused[real]",
        "sglang/test_sleeping_servers.py::test_run_with_servers_and_trainer_in_turns[fake-extra1]",
        "sglang/test_routed_experts.py"
        "::test_a_server_that_tells_no_experts_is_refused_with_what_to_type[fake]",
        "sglang/test_rank_publication.py::test_files_are_divided_among_the_ranks",
        "sglang/test_rank_publication.py"
        "::test_each_worker_gets_the_handles_of_the_rank_beside_it[fake]",
        "cli/test_servers.py::test_website_is_not_accepted_as_server",
        "cli/test_servers.py::test_unreachable_server_hints_at_the_start_command",
        "cli/test_servers.py::test_probe_refuses_another_model_of_the_same_shape",
        "vllm/test_weight_checks.py::test_killed_server_is_restarted_with_the_newest_weights[fake]",
        "sglang/test_routed_experts.py::test_servers_that_a_run_starts_are_told_to_tell[fake]",
        "engines/test_servers_lost_asleep.py"
        "::test_launched_server_that_is_killed_in_its_sleep_is_started_again[vllm]",
        # Ranks: other settings, objectives or optimizers run always.
        "trainer/test_ranks.py::test_ranks_train_what_one_rank_trains[2-settings3-1e-05]",
        "trainer/test_ranks.py::test_argument_errors_are_raised_on_every_rank",
        "trainer/test_ranks.py::test_checkpoint_resumes_with_another_number_of_ranks"
        "[1-others0-settings0]",
        "trainer/test_worker.py::test_worker_construction_errors_are_raised_here",
        "trainer/test_worker.py::test_worker_holds_critic_and_reference",
        "trainer/test_worker.py::test_worker_reports_a_full_disk_and_continues",
        "trainer/test_out_of_memory.py"
        "::test_out_of_memory_error_names_the_setting_to_lower[process]",
        "trainer/test_adamw_8bit.py::test_plan_counts_the_bytes_of_the_states",
        "trainer/test_adamw_8bit.py::test_checkpoint_continues_under_any_number_of_ranks[1-others0]",
        "trainer/test_lora.py::test_worker_trains_adapters[2]",
        "trainer/test_lost_writers.py"
        "::test_full_disk_of_a_rank_is_a_readable_error_and_training_goes_on",
        "models/test_hf_reward_model.py::test_two_ranks_learn_what_one_learns[qwen3_moe]",
        "runs/test_rounding_engine.py"
        "::test_gspo_with_a_bfloat16_engine_clips_nothing_on_policy[process]",
        # Whole runs and tables.
        "runs/test_train.py::test_two_sigterms_lose_nothing_and_the_run_resumes",
        "runs/test_restarts.py::test_run_without_a_checkpoint_begins_again_and_gives_up_in_the_end",
        "runs/test_role_runs.py::test_self_play_learns_the_solution[rae]",
        "runs/test_preset_runs.py::test_asynchronous_preset_run_is_replayed_exactly[ppo]",
        "runs/test_transformers_runs.py"
        "::test_an_architecture_of_transformers_is_trained_resumed_and_evaluated[qwen3_moe]",
        "runs/test_objective_runs.py::test_objective_runs_from_the_command_line",
        "runs/test_objective_runs.py::test_server_as_teacher",
        "warm_start/test_vision_starter.py::test_small_policy_learns_to_count_by_eye",
        "loggers/test_loggers.py::test_command_line_run_with_loggers",
        "test_reproduce.py::test_a_table_is_made_at_toy_size[staleness]",
        "docs/test_code_blocks.py::test_page[tutorial-gpus.md]",
        "plugins/test_scaffold.py::test_scaffolded_packages_install_and_pass_their_tests",
        "test_gpu_hour.py::test_parts_are_measured_beside_their_plan",
        "test_gpu_hour.py::test_part_that_fails_takes_none_down_and_is_tried_again",
        "config/test_recipes.py::test_recipe_carries_its_plan[gsm8k_0.6b]",
        "chaos/test_chaos.py::test_small_chaos_loses_nothing[gateway_calls]",
        "chaos/test_chaos.py::test_small_chaos_loses_nothing[killed_places]",
        "chaos/test_chaos.py::test_small_chaos_loses_nothing[signals]",
        "chaos/test_chaos.py::test_small_chaos_loses_nothing[directories]",
        "chaos/test_chaos.py::test_small_chaos_loses_nothing[disk_full]",
        # Plans and sandboxes.
        "plan/test_simulated_pictures.py"
        "::test_every_part_of_a_step_with_pictures_is_simulated[gemma3-overrides2]",
        "plan/test_simulated_pictures.py"
        "::test_every_part_of_a_step_with_pictures_is_simulated[qwen2_5_vl-overrides0]",
        "plan/test_simulated_pictures.py::test_a_plan_counts_the_tower_by_patches",
        "plan/test_plan.py::test_offloaded_states_are_the_hosts",
        "plan/test_plan.py::test_servers_without_room_are_said",
        "plan/test_simulated_step.py::test_shards_are_what_arithmetic_gives",
        "plan/test_simulated_step.py"
        "::test_every_part_of_a_step_of_the_tiny_decoder_is_simulated[extra1]",
        "plan/test_simulated_step.py::test_logits_are_those_of_the_chunk_that_the_trainer_takes",
        "plan/test_simulated_step.py::test_attention_without_a_fused_kernel_keeps_its_scores",
        "sandbox/test_containment.py"
        "::test_attack_suite_is_contained_without_namespaces[built-in-170]",
        "sandbox/test_containment.py::test_attack_suite_is_contained_as_ordinary_user[built-in-170]",
        "envs/tau2/test_tau2_env.py::test_tau2_domains_pass_the_checker[retail]",
    }
)
