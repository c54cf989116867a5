"""`forerun`, and `python -m launcher`. Imports the standard library alone: Ctrl-C may come before click is loaded."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; a Ctrl-C that comes before it can answer, or while it ends, is exit 130 and one line."""
    try:
        from launcher.base.terminal import open_standard_streams

        open_standard_streams()
        from launcher.cli import cli

        cli.main()
    except KeyboardInterrupt:
        print("forerun: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
