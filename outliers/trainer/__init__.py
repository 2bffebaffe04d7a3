"""Training in int8, and what is looked at while a model trains."""
