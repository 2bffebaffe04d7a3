"""Training in int8, and measurements during training."""
