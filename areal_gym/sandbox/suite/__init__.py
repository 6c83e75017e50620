"""Runs hostile programs in a sandbox, to test whether it contains them on this machine.

    python -m areal_gym.sandbox.suite [FILE...] [--sandbox process|docker|ID] [--json]

Without a file, `hostile.json` and `programs/*.toml` beside this module are run.
"""
