"""Compares the sum of a model's tuples with the whole model: figures, coverage, intervals, kernels,
and the outcome.
"""
