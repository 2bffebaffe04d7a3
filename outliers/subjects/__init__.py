"""What is measured: a model with its inputs and its own loss, a file a family."""
