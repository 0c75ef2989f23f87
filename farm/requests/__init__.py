"""What a person asks for: a wish and its defaults, measurement files, which cards, the names of operators."""
