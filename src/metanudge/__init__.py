"""metanudge."""
