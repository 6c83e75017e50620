"""Players of the user: a script, rules, or a language model."""
