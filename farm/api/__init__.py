"""The functions of `import farm`, for programs and notebooks. docs/python.md shows examples."""
