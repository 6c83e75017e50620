"""tau2: customer service with a user, tools and a database; the verdicts of tau2-bench."""
