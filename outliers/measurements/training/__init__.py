"""What is measured of models that train: at any moment, and of whole runs."""
