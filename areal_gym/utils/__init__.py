"""Helpers without words of reinforcement learning: files, threads, statistics, text."""
