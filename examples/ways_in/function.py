"""A reward function: the rows are yours (`--data ROWS --reward FILE:exact`)."""


def exact(completion, answer):
    return float(completion.strip() == str(answer))
