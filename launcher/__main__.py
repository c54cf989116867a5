"""`forerun`, and `python -m launcher`. Imports the standard library alone: Ctrl-C may come before
click is loaded.
"""

import importlib.util
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; a Ctrl-C that comes before it can answer, or while it ends, is exit 130
    and one line.
    """
    try:
        from launcher.base.terminal import open_standard_streams

        open_standard_streams()
        from launcher.cli import cli

        cli.main()
    except KeyboardInterrupt:
        print("forerun: interrupted", file=sys.stderr)
        sys.exit(130)
    except ImportError:
        spec = importlib.util.find_spec("proxies")
        where = spec and spec.origin
        if where == str(Path(__file__).resolve().parents[1] / "proxies" / "__init__.py"):
            raise
        print(
            f"forerun: `import proxies` finds {where or 'nothing'}, not forerun's package; rename "
            "or remove the other "
            "one, or take its folder out of PYTHONPATH",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
