"""Two executions of one run: are they the same as far as arithmetic promises? Pure functions.

On one kind of processor, with one version of torch, a run gives the same bits wherever it runs (docs/banks.md), so one
flipped bit is enough. Elsewhere sums are taken in another order, and training makes rounding larger: there a difference
is held against what the run itself does when each initial weight is moved to a neighbouring float.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from proxies.core.spec import Curve, RunResult, RunSpec
from sweeps.run.pool import Replay
from sweeps.store.sites import CPU, HOST, PROCESS, RESUMED

FACTOR = 10.0
"""Times what a nudge does, at most, for two executions to agree where bits may differ: docs/silent-corruption.md has
how much of it other arithmetic took.
"""
LEAST_SHARE = 2.0**-23
"""Of the loss: what a nudge does, at least. A loss is a float32, and two that are equal may hide as much."""
NUM_NUDGED = 2
"""Nudged runs: one on each of the two hosts, for the one that computes wrongly would only say that much is allowed."""
_KIND = ("python", "torch", "machine", "device", CPU)

Apart = Literal["host", "process", "nothing", "unknown"]
Allowed = Literal["bitwise", "nudged"]
Outcome = Literal["agrees", "differs", "cannot_tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """One execution of a run."""

    result: RunResult
    curve: Curve

    @property
    def host(self) -> str:
        """Where it ended; empty where an older version did not say."""
        return self.result.environment.get(HOST, "")

    @property
    def process(self) -> str:
        """In which process there."""
        return self.result.environment.get(PROCESS, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Distance:
    """How far two executions are from each other."""

    same: bool
    """To the last bit: losses, gradient norms, end."""
    alike: bool
    """Both finished, or both diverged at the same step."""
    largest_nats: float
    """Of the training losses, over the steps that both have."""
    at_step: int | None
    """Where the losses part first; None if they never do."""
    end_nats: float | None
    """Of the validation losses; None where one has none."""

    @property
    def nats(self) -> float:
        """The larger of both."""
        return max(self.largest_nats, self.end_nats or 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is to be run before there is a verdict."""

    replay: Replay
    near: str = ""
    """The host where it should run, if it can be had."""
    away_from: tuple[str, ...] = ()
    """Hosts that would tell nothing."""
    strictly: bool = False
    """Elsewhere, or not at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What came of a replay."""

    outcome: Outcome
    apart: Apart
    """What the first two executions did not share: a fault of something that they share would not be seen."""
    hosts: tuple[str, ...]
    """Of the executions, the first one first."""
    processes: tuple[str, ...]
    curve_ids: tuple[str, ...]
    largest_nats: float
    at_step: int | None
    end_nats: float | None
    """Of the first two: see `Distance`."""
    allowed_nats: float | None
    """What may differ; None: it could not be measured."""
    allowed_from: Allowed
    """The same bits are promised, or `FACTOR` times what a nudge of the initial weights did."""
    odd_host: str
    """The one that computes wrongly, where that is known."""
    reason: str


def distance(one: Ran, other: Ran) -> Distance:
    """How far `other` is from `one`."""
    pairs = list(zip(one.curve.steps, one.curve.train_loss_nats, other.curve.train_loss_nats, strict=False))
    apart = [step for step, mine, theirs in pairs if mine != theirs]
    ends = (one.result.loss_nats, other.result.loss_nats)
    alike = _end(one) == _end(other)
    return Distance(
        same=alike and ends[0] == ends[1] and one.result.curve_id == other.result.curve_id,
        alike=alike,
        largest_nats=max((abs(mine - theirs) for _, mine, theirs in pairs), default=0.0),
        at_step=apart[0] if apart else None,
        end_nats=None if ends[0] is None or ends[1] is None else abs(ends[0] - ends[1]),
    )


def promised(spec: RunSpec, one: Ran, other: Ran) -> bool:
    """Whether both must have the same bits: one kind of CPU and of software, begun at step 0, whole batches, our code.

    On a GPU, sums by atomic additions come in any order; what a user's own model does, we do not know.
    """
    mine, theirs = one.result.environment, other.result.environment
    alike = all(mine.get(key) == theirs.get(key) for key in _KIND) and CPU in mine
    changed = any(key in place for key in (RESUMED, "num_microbatches") for place in (mine, theirs))
    return alike and not changed and mine.get("device") == "cpu" and spec.factory is None


def judge(
    spec: RunSpec, first: Ran, again: Sequence[Ran], nudged: Sequence[Ran], *, more_hosts: bool
) -> Verdict | Wanted:
    """What the executions say, or the one that is wanted next.

    Args:
        spec: the run.
        first: the execution that counts.
        again: replays, in order: one, and a third execution to tell who is odd.
        nudged: with other initial weights by one rounding.
        more_hosts: whether there is a host besides those of `first` and `again[0]`.
    """
    if not again:
        return Wanted(replay="again", away_from=(first.host,))
    runs = (first, *again)
    unequal = [pair for pair in combinations(runs, 2) if not distance(*pair).same]
    if distance(first, again[0]).same:
        return _verdict(runs, 0.0, "bitwise", "agrees", "the same bits")
    by_noise = any(not promised(spec, *pair) for pair in unequal)
    if by_noise and len(nudged) < NUM_NUDGED:
        return Wanted(replay="nudged", near=runs[len(nudged)].host)
    if by_noise and any(_end(ran) != _end(first) for ran in nudged):
        said = "a nudge of its initial weights alone decides how it ends: it tells nothing of a machine"
        return _verdict(runs, None, "nudged", "cannot_tell", said)
    apart = [distance(ran, n) for n in nudged for ran in runs]
    least = LEAST_SHARE * max(first.curve.train_loss_nats, default=0.0)
    allowed = FACTOR * max(least, min((each.nats for each in apart if each.alike), default=0.0))

    def agree(one: Ran, other: Ran) -> bool:
        far = distance(one, other)
        return far.same or (far.alike and far.nats <= allowed and not promised(spec, one, other))

    bits = promised(spec, first, again[0])
    source: Allowed = "bitwise" if bits else "nudged"
    limit = 0.0 if bits else allowed
    if agree(first, again[0]):
        return _verdict(runs, limit, source, "agrees", f"within {FACTOR:g} times what a nudge does")
    if first.host and first.host == again[0].host:
        said = f"{first.host} gave two answers to one question"
        return _verdict(runs, limit, source, "differs", said, first.host)
    if len(again) == 1 and more_hosts:
        return Wanted(replay="again", away_from=(first.host, again[0].host), strictly=True)
    if len(again) == 1:
        said = f"which of {first.host or 'the first'} and {again[0].host} is wrong, a third host would tell"
        return _verdict(runs, limit, source, "differs", said)
    sides = (agree(first, again[1]), agree(again[0], again[1]))
    if sides[0] == sides[1]:
        said = "and a third execution agrees with " + ("both" if sides[0] else "neither")
        return _verdict(runs, limit, source, "differs", said)
    odd, right = (again[0], first) if sides[0] else (first, again[0])
    said = f"a third execution on {again[1].host} agrees with {right.host or 'the first'}"
    return _verdict(runs, limit, source, "differs", said, odd.host)


def unjudged(first: Ran, why: str) -> Verdict:
    """Of a replay that could not be had."""
    return _verdict((first, first), None, "bitwise", "cannot_tell", why)


def _end(ran: Ran) -> tuple[str, int]:
    return ran.result.status, ran.result.num_steps


def _verdict(
    runs: Sequence[Ran], allowed: float | None, source: Allowed, outcome: Outcome, reason: str,
    odd_host: str = "",
) -> Verdict:  # fmt: skip
    apart = distance(runs[0], runs[1])
    return Verdict(
        outcome=outcome, apart=_apart(*runs[:2]), hosts=tuple(ran.host for ran in runs),
        processes=tuple(ran.process for ran in runs), curve_ids=tuple(ran.result.curve_id for ran in runs),
        largest_nats=apart.largest_nats, at_step=apart.at_step, end_nats=apart.end_nats, allowed_nats=allowed,
        allowed_from=source, odd_host=odd_host, reason=reason,
    )  # fmt: skip


def _apart(one: Ran, other: Ran) -> Apart:
    if not one.host or not other.host:
        return "unknown"
    return "host" if one.host != other.host else "process" if one.process != other.process else "nothing"
