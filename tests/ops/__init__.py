"""The case table through one composition of transforms per file."""
