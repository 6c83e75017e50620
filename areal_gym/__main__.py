"""`python -m areal_gym`."""

from areal_gym.cli import main

main()
