"""The catalog of models and its sources: one module per source."""
