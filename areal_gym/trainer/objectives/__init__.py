"""What `areal_gym.trainer.supervised` learns, and a teacher's log-probabilities as an advantage."""
