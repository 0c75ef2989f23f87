"""One training step, taken apart: its stages, its operators with their owners, and the life of every tensor."""
