"""Hostile programs against a sandbox: does it hold on this machine?

    python -m areal_gym.sandbox.suite [FILE...] [--sandbox process|docker|ID] [--json]

Without a file, `hostile.json` and `programs/*.toml` beside this module are run.
"""
