"""Our layers and numbers in other libraries, by their own registries."""
