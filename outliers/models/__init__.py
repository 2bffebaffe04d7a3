"""Where a model comes from and what its parts are called."""
