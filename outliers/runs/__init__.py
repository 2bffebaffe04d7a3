"""Run cells: plan which are missing, measure each once, and write their rows."""
