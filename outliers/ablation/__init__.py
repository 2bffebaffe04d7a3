"""Features taken out of a model, and what it loses."""
