"""What is done to a model before it is measured."""
