"""`code`: write a function, which hidden tests call in a sandbox.

code_env        the environment, and the tests that are calls
code_tasks      functions that are built in, by level; rows of MBPP, HumanEval or your own

Tests that are statements run in a cell of their own, apart from the code that they test:

statements      what a statement needs: imports, helpers, the function under test
verification    two cells, and the calls that travel between them
testing_cell    runs in one of them: the tests
serving_cell    runs in the other: the policy's functions
plain_values    what may travel
"""
