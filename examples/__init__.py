"""Programs written for one example, pixel or row, and run for all of them at once."""
