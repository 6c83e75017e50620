"""`harbor:PATH`: tasks that are folders with an image, an instruction and tests."""
