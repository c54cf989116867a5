"""Program that runs the head of a Ray cluster on this machine: it starts Ray, writes Ray's address
into a file, and waits to be ended.

    python -P ray_head.py ADDRESS_FILE NUM_CPUS OBJECT_STORE_BYTES RAY_DIR

It runs under `proxies.external.keeper`, which ends it with all processes that Ray has started,
however the driver ends. `ray start --head` is not used because it also opens Ray Client's port.
RAY_DIR may be empty: Ray then uses its default folder.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

_ASK_SECONDS = 0.5


def main(address_file: str, num_cpus: str, object_store_bytes: str, ray_dir: str) -> None:
    """Start Ray, write its address, and wait to be ended."""
    import ray

    _wait_until_node_registers(ray._private.services)
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


def _wait_until_node_registers(services: Any) -> None:
    """Have Ray wait until its node is registered.

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
