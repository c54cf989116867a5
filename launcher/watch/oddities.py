"""What is odd about a log, in sentences for whoever has to judge what it is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from launcher.watch.gathering import Gathered
from launcher.watch.keys import LOSS, PER_DEVICE, STEP, TOKENS_PER_SECOND, Keys
from launcher.watch.series import Floats

_SENTENCES = {
    "bad step": "{n} lines have a step that is no whole number, as {first}: they are left out",
    "no step": "{n} lines have a loss and no step: they are left out",
    "beyond": "{n} lines are of steps outside 1 to {top}, as {first}, and are left out: does it count something else, "
    "or is it another run?",
    "again": "{n} steps were logged again, the first is {first}: the last value counts",
    "out of order": "{n} steps came out of order, the first is {first}: they are put in order",
    "no number": "{n} training losses are no numbers, the first at step {first}",
}


def not_finite(parts: Sequence[Gathered]) -> list[int]:
    """Steps whose training loss is given as NaN or infinite."""
    found = [part.lines.steps[(part.numbers) & np.isnan(part.lines.column(LOSS))]
             for part in parts]  # fmt: skip
    return sorted({int(step) for steps in found for step in steps})


def odd_notes(parts: Sequence[Gathered], keys: Keys, names: Mapping[str, str], there: Sequence[str], top: int,
              num_ranks: int) -> list[str]:  # fmt: skip
    """What a reader must know of the log, in sentences; `there`: names in it, `top`: the run's last step."""
    odd, first = Counter[str](), dict[str, object]()
    for part in parts:
        odd += part.odd
        first = {**part.first, **first}
    twice = _twice(parts)
    if len(twice):
        odd["again"] += len(twice)
        first.setdefault("again", int(twice[0]))
    said = [text.format(n=odd[what], first=_short(first[what]), top=top) for what, text in _SENTENCES.items()
            if odd[what]]  # fmt: skip
    if missing := not_finite(parts):
        said.append(f"the training loss is no finite number at {len(missing)} steps, the first is {missing[0]}")
    said += [_missing(column, keys, there) for column in (STEP, LOSS) if there and column not in names]
    num_bare = sum(part.num_bare for part in parts)
    if num_bare and LOSS in names:
        said.append(f"{num_bare} steps have no loss: they are left out")
    absent = [column for column in ("grad_norm", TOKENS_PER_SECOND) if column not in names]
    if absent and LOSS in names:
        said.append(f"it has no {' and no '.join(absent)}: what needs that is not judged")
    speed = names.get(TOKENS_PER_SECOND, "")
    if speed in PER_DEVICE and num_ranks > 1:
        said.append(f"its {speed!r} is of one device: taken {num_ranks} times, for the ranks of the frozen config")
    return said


def _twice(parts: Sequence[Gathered]) -> Floats:
    """Steps whose loss is in more than one file."""
    steps = [part.lines.steps[part.numbers] for part in parts]
    found, counts = np.unique(np.concatenate([np.empty(0), *steps]), return_counts=True)
    return found[counts > 1]


def _missing(column: str, keys: Keys, there: Sequence[str]) -> str:
    option = {STEP: "--step-key", LOSS: "--train-loss-key"}[column]
    held = ", ".join(sorted(there)[:20])
    return f"it has no {column}, looked for as {keys.told(column)}: it holds {held}; name it with {option}"


def _short(value: object) -> str:
    return f"{value!r:.60}"
