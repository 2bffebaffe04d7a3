"""Where a scheme damages a model: by projection, by role and by layer, and over all of it."""
