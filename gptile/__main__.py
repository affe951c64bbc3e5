"""``python -m gptile``."""

from gptile.cli import main

main()
