"""`python -m forerun`: the command line."""

from launcher.cli.cli import main

if __name__ == "__main__":
    main()
