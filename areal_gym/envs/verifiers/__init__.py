"""Environments of the library verifiers, played in a process with a Python of their own."""
