"""The data files of the installed package."""
