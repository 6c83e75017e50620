"""What CPUs get of their own: attention in C."""
