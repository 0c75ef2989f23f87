"""Reports on jobs, readings and models, computed from the rows of the database."""
