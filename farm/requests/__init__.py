"""Turns a user's input into requests: defaults, measurement files, selection of cards, memory
limits.
"""
