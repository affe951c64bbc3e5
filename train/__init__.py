"""A minimal trainer: what the demo checkpoint needs, exact to the bit on resume."""
