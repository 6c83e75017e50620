"""Variants of tests that are `long` by their names; another variant of each runs always.

They take 5 to 20 seconds of CPU time each on a slow machine. `tests/test_long_variants.py` checks
that they exist.
"""

LONG_VARIANTS = frozenset(
    {
        # Served runs and rules: the other server, channel or way to interrupt runs always.
        "sglang/test_runs.py::test_run_over_a_server[fake-disk]",
        "sglang/test_runs.py::test_run_over_a_server[real-distributed]",
        "sglang/test_runs.py::test_run_over_a_server[real-tensor]",
        "sglang/test_runs.py::test_server_with_another_model_is_refused[real]",
        "sglang/test_sleeping_servers.py::test_run_with_servers_and_trainer_in_turns[fake-extra0]",
        "sglang/test_sleeping_servers.py::test_run_with_servers_and_trainer_in_turns[real-extra2]",
        "sglang/test_sglang_contract.py::test_sglang_keeps_the_contract[real-publication-abort]",
        "sglang/test_sglang_contract.py::test_sglang_keeps_the_contract[real-sleep-abort]",
        "sglang/test_sglang_contract.py::test_sglang_keeps_the_contract[real-updates-in-flight-abort]",
        "vllm/test_vllm_contract.py::test_vllm_keeps_the_contract[real-publication-keep]",
        "vllm/test_vllm_contract.py::test_vllm_keeps_the_contract[real-sleep-abort]",
        "vllm/test_vllm_contract.py::test_vllm_keeps_the_contract[real-updates-in-flight-abort]",
        # Runs: another algorithm, family or place of the trainer runs always.
        "envs/tau2/test_tau2_env.py::test_tau2_domains_pass_the_checker[retail]",
        "plan/test_simulated_pictures.py"
        "::test_every_part_of_a_step_with_pictures_is_simulated[gemma3-overrides2]",
        "plan/test_simulated_pictures.py"
        "::test_every_part_of_a_step_with_pictures_is_simulated[qwen2_5_vl-overrides0]",
        "plan/test_simulated_step.py"
        "::test_every_part_of_a_step_of_the_tiny_decoder_is_simulated[extra1]",
        "runs/test_preset_runs.py::test_asynchronous_preset_run_is_replayed_exactly[ppo]",
        "runs/test_role_runs.py::test_self_play_learns_the_solution[rae]",
        "runs/test_rounding_engine.py"
        "::test_gspo_with_a_bfloat16_engine_clips_nothing_on_policy[process]",
        "runs/test_transformers_runs.py"
        "::test_an_architecture_of_transformers_is_trained_resumed_and_evaluated[qwen3_moe]",
        "trainer/test_out_of_memory.py"
        "::test_out_of_memory_error_names_the_setting_to_lower[process]",
    }
)
