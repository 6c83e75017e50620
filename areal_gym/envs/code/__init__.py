"""`code`: write a function, which hidden tests call in a sandbox.

generated   functions that are built in, by level
rows        those of files: MBPP, HumanEval, or arguments and results
running     tests that are calls: what enters the sandbox, and what comes back is compared here

Tests that are statements run in a cell of their own, apart from the code that they test:

statements      what a statement needs: imports, helpers, the function under test
verification    two cells, and the calls that travel between them
testing_cell    runs in one of them: the tests
serving_cell    runs in the other: the policy's functions
plain_values    what may travel
"""
