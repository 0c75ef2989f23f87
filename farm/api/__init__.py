"""What a program or a notebook calls: the functions of `import farm`. docs/python.md shows them."""
