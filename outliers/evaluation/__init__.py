"""What a model's quality is measured by."""
