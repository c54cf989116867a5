"""What has changed between two plans, key by key."""

from __future__ import annotations

from collections.abc import Mapping

from proxies import canon
from proxies.canon import Json


def plan_changes(old: Json, new: Json, defaults: Mapping[str, Json]) -> dict[str, tuple[str, str]]:
    """Dotted keys whose values differ, with both as JSON text.

    Args:
        old: a plan; a list is a value.
        new: another one.
        defaults: by dotted key, what a plan that lacks the key says.
    """
    flat_old, flat_new = _flat(old), _flat(new)
    for key, value in defaults.items():
        for flat in (flat_old, flat_new):
            if not any(name == key or name.startswith(f"{key}.") for name in flat):
                flat.update(_flat(value, key))
    absent = "(not there)"
    pairs = {key: (flat_old.get(key, absent), flat_new.get(key, absent)) for key in sorted(flat_old | flat_new)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flat(value: Json, prefix: str = "") -> dict[str, str]:
    """Dotted keys to values as JSON text; lists are values."""
    if not isinstance(value, dict) or (not value and prefix):
        return {prefix: canon.canonical(value)}
    flat: dict[str, str] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat
