"""Environments: the contract, tools, tasks, built-in environments, adapters, checker and server."""
