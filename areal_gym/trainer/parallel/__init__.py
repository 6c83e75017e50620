"""Several ranks: FSDP2, process groups and the trainer in a child process."""
