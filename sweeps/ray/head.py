"""The head of a Ray cluster of our own, as a program: starts Ray, writes its address into a file,
and stays.

    python -P ray_head.py ADDRESS_FILE NUM_CPUS OBJECT_STORE_BYTES RAY_DIR

It runs under `proxies.external.keeper`, which ends it with all that Ray has started, however the
driver ends. `ray start --head` would also open Ray Client's port. RAY_DIR may be empty: then Ray
takes its own.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

_ASK_SECONDS = 0.5


def main(address_file: str, num_cpus: str, object_store_bytes: str, ray_dir: str) -> None:
    """Start Ray, tell where, and wait to be ended."""
    import ray

    _wait_longer_for_the_node(ray._private.services)
    context: Any = ray.init(
        address="local",
        num_cpus=int(num_cpus),
        include_dashboard=False,
        object_store_memory=int(object_store_bytes),
        log_to_driver=False,
        _temp_dir=ray_dir or None,
    )
    new = Path(f"{address_file}.new")
    new.write_text(context.address_info["gcs_address"], encoding="utf-8")
    new.rename(address_file)
    threading.Event().wait()


def _wait_longer_for_the_node(services: Any) -> None:
    """Have Ray wait until its node is there: by itself it gives up after 30 s, and a busy machine
    takes longer.

    How long is too long is the driver's to say, who ends this program.
    """
    ask = services.get_node

    def patient(*arguments: Any) -> Any:
        while True:
            try:
                return ask(*arguments)
            except RuntimeError:  # its node is not registered yet
                time.sleep(_ASK_SECONDS)

    services.get_node = patient


if __name__ == "__main__":
    main(*sys.argv[1:])
