"""Chaos: the product is killed, starved and mis-fed on purpose, and what it lost is counted."""
