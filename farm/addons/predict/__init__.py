"""Predict time, power and energy of operators that have no reading."""
