"""What looks on while a frozen config's run trains: the hooks that its policies ask for."""

from __future__ import annotations

from launcher.frozen import Decision
from launcher.hooks import Hook
from launcher.replay import Replay
from launcher.spikes import SpikeWatch
from launcher.telemetry import Layers, Machines, Validation


def hooks_of(decision: Decision) -> list[Hook]:
    """In the order in which they are called. What the config does not ask for is not there."""
    watched = decision.monitoring
    hooks: list[Hook] = [Machines()]
    if decision.spikes.max_rollbacks:
        hooks.append(SpikeWatch(decision.spikes))
    if watched.layers_every_steps:
        hooks.append(Layers(watched.layers_every_steps))  # before the replay, which computes the gradients anew
    if watched.replay_every_steps:
        hooks.append(Replay(watched.replay_every_steps))
    if watched.validate_every_steps:
        hooks.append(Validation(watched.validate_every_steps))
    return hooks
