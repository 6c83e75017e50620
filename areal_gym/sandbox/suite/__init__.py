"""Hostile code against a sandbox: does it hold on this machine?

    python -m areal_gym.sandbox.suite [FILE...] [--backend process|docker|none] [--json]

Without a file, the snippets beside this module are run.
"""
