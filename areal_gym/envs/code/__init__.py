"""`code`: write a function, which hidden tests call in a sandbox.

generated   functions that are built in, by level
rows        those of files: MBPP, HumanEval, or arguments and results
running     the tests: what enters the sandbox and what comes back
"""
