"""Program that runs the head of a Ray cluster on this machine: it starts Ray, writes Ray's address
into a file, and waits to be ended.

    python -P head.py ADDRESS_FILE NUM_CPUS OBJECT_STORE_BYTES RAY_DIR

`forerun._proxies.external.command_supervisor` runs this program. It ends the program and all
processes that Ray has started, however the driver ends. `ray start --head` is not used because it
also opens Ray Client's port. RAY_DIR may be empty: Ray then uses its default folder.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

_ASK_SECONDS = 0.5  # Pause between two questions whether the node is registered


def main(address_file: str, num_cpus: str, object_store_bytes: str, ray_dir: str) -> None:
    """Start Ray, write its address, and wait to be ended."""
    import ray

    _patch_get_node(ray._private.services)
    context: Any = ray.init(
        address="local",
        num_cpus=int(num_cpus),
        include_dashboard=False,
        object_store_memory=int(object_store_bytes),
        log_to_driver=False,
        _temp_dir=ray_dir or None,
    )
    new_file = Path(f"{address_file}.new")
    new_file.write_text(context.address_info["gcs_address"], encoding="utf-8")
    new_file.rename(address_file)
    threading.Event().wait()


def _patch_get_node(services: Any) -> None:
    """Replace Ray's `get_node` by a function that waits until the node is registered.

    Ray by itself gives up after 30 s, and a busy machine takes longer. The driver decides how long
    is too long, and ends this program.
    """
    get_node = services.get_node

    def retry(*arguments: Any) -> Any:
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # the node is not registered yet
                time.sleep(_ASK_SECONDS)

    services.get_node = retry


if __name__ == "__main__":
    main(*sys.argv[1:])
