"""Training on several ranks: FSDP2, process groups, and trainers in child processes."""
