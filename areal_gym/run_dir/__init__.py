"""The run directory: its files, trajectories, provenance and status."""
