"""`python -m launcher` is `forerun`."""

from launcher.cli import main

main()
