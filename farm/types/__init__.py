"""Plain, content-addressed values that every room speaks: tuple, protocol, reading, request. No torch, no database."""
