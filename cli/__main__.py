"""``python -m cli`` is ``farm``."""

from cli.main import main

main()
