"""Extracts the operators of a variant; builds and captures training steps, with the lifetime of
their tensors.
"""
