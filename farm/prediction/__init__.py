"""What an operator should cost where nobody has read it."""
