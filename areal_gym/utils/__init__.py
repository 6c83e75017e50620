"""General helpers that know nothing of reinforcement learning: files, threads, statistics, text."""
