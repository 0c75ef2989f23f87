"""Plain value classes that all packages use: tuple, protocol, reading, request. No torch, no
database.
"""
