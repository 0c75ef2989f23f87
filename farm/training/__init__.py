"""The extraction of a variant, and training steps: their stages, captures and the life of every tensor."""
