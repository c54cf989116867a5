"""Run the command line: `forerun`, and `python -m forerun`.

This module imports only the standard library, because Ctrl-C may come before click is loaded.
"""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. On Ctrl-C while it loads or ends, print one line and exit with 130."""
    try:
        from forerun._launcher.main_run.terminal_layout import open_standard_streams

        open_standard_streams()
        from forerun._launcher.cli import cli

        cli.main()
    except KeyboardInterrupt:
        print("forerun: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
