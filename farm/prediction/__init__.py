"""Predicted time, power and energy of operators without a reading."""
