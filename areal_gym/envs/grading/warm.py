"""Imported once by the process that forks the workers: sympy's parsers and caches are then warm.

The first formula costs 0.1 s, the next ones 3 ms; a forked worker would always read a first one.
"""

from areal_gym.envs.grading.algebra import are_same_expressions

for _a, _b in (
    (r"\frac{x+1}{2}", r"\frac{x}{2} + 0.5"),
    (r"2\sqrt{3} \pi", r"\sqrt{12} \cdot \pi"),
    (r"\sin^2 x + \cos^2 x + e^{2i}", r"(a+b)^{2} - \log_2 8"),
    ("x^2 + y = 3 z", "y - 3z = -x^2"),
):
    are_same_expressions(_a, _b)
