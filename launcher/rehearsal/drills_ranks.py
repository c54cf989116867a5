"""Drills about ranks: two of them against one, one of them killed, one of them stuck, fewer and more of them."""

from __future__ import annotations

from launcher.base.watchdog import FLOOR_SECONDS
from launcher.rehearsal.plants import Plant, struck
from launcher.rehearsal.results import DrillResult, judged
from launcher.rehearsal.stage import TO_ONE_RANK, Stage
from proxies.core.canon import Json
from proxies.core.spec import Dtype

STRUCK_STEP = 10
"""Between two checkpoints, past the warmup."""
FROM_ONE_RANK = "from-one-rank"
LOSS_NATS: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.05}
"""That another number of ranks may make of a step's loss: sums in another order round otherwise."""
WEIGHTS_SHARE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""And of the weights, as a share of their norm: Adam makes whole steps of gradients that are all rounding."""


def two_ranks(stage: Stage) -> DrillResult:
    """One batch on two ranks is one batch on one rank, but for the order of sums; and twice on two, bit by bit."""
    if stage.scaled.kind == "full":
        return _of_the_copy("two_ranks")
    two, one, again = stage.losses(stage.reference()), stage.losses(stage.one_rank()), stage.losses(stage.cut_thrice())
    first = abs(two[1] - one[1])
    worst = max(abs(two[step] - one[step]) for step in two)
    repeated = sum(two[step] == again.get(step) for step in two)
    limit = LOSS_NATS[stage.decision.precision]
    holds = worst <= limit and repeated == len(two) == len(one)
    bitwise = "bitwise" if first == 0 else f"within {first:.1g} nats, no more than rounding"
    ranks = stage.decision.parallelism.num_ranks
    return judged(
        "two_ranks", holds,
        f"the first batch on {ranks} ranks and on one: the same loss {bitwise}; over {len(two)} steps within "
        f"{worst:.1g} nats; done twice on {ranks} ranks, {repeated} of {len(two)} losses are bitwise equal",
        seen={"first_loss_apart_nats": first, "worst_loss_apart_nats": worst, "num_repeated_bitwise": repeated},
        limit=f"{limit:g} nats against one rank; bitwise against itself",
        advice="the ranks do not train one batch: look at how it is dealt out and how gradients are averaged",
    )  # fmt: skip


def killed_rank(stage: Stage) -> DrillResult:
    """A rank killed between gradients and update: the job is started again, and its weights end the same."""
    return _struck(
        stage, "killed_rank", Plant(fault="kill", step=STRUCK_STEP), FLOOR_SECONDS,
        "a rank was killed (SIGKILL)",
        "the supervisor did not bring the run back to where it was: see torchrun.log in the run's folder",
    )  # fmt: skip


def hang(stage: Stage) -> DrillResult:
    """A rank that stands still: the supervisor notices, kills the job, starts it again."""
    return _struck(
        stage, "hang", Plant(fault="hang", step=STRUCK_STEP), stage.hang_seconds,
        f"a rank stood still; after {stage.hang_seconds:g} s without a step the job was killed",
        "a hang would stand for as long as nobody looks: the supervisor's watch on steps did not see it",
    )  # fmt: skip


def _struck(stage: Stage, name: str, plant: Plant, hang_seconds: float, what: str, advice: str) -> DrillResult:
    run = stage.fresh(name.replace("_", "-"))
    outcome = stage.run(run, plant, max_restarts=1, hang_seconds=hang_seconds)
    was_struck = struck(stage.path(run), plant.fault).exists()
    seen: dict[str, Json] = {
        "event": outcome.event, "num_restarts": outcome.num_restarts, "struck": was_struck,
        "struck_before_update": plant.step + 1,
    }  # fmt: skip
    limit = "one restart, every weight and moment bitwise that of the uninterrupted run"
    if outcome.event != "finished":
        said = f"{what} before update {plant.step + 1}; the run {outcome.event}: {outcome.reason}"
        return judged(name, False, said, seen=seen, limit=limit, advice=advice)
    apart = stage.apart(stage.reference(), run)
    seen["num_tensors_differing"] = apart.num_differing
    return judged(
        name, was_struck and outcome.num_restarts == 1 and apart.bitwise,
        f"{what} before update {plant.step + 1}, {outcome.num_restarts} restart; at the end {apart.told}",
        seen=seen, limit=limit, advice=advice,
    )  # fmt: skip


def world_size(stage: Stage) -> DrillResult:
    """A run that goes on with other ranks than it began with stays the same run, up to rounding."""
    if stage.scaled.kind == "full":
        return _of_the_copy("world_size")
    own, at = stage.decision.parallelism.num_ranks, stage.forked_at
    seen: dict[str, Json] = {}
    texts, holds = [], True
    limit_nats = LOSS_NATS[stage.decision.precision]
    limit_share = WEIGHTS_SHARE[stage.decision.precision]
    changes = ((stage.reference(), TO_ONE_RANK, own, 1), (stage.one_rank(), FROM_ONE_RANK, 1, own))
    for source, run, before, ranks_then in changes:
        if run == FROM_ONE_RANK or not stage.ended(run):
            outcome = stage.run(stage.forked(source, at, run), num_ranks=ranks_then)
            if outcome.event != "finished":
                holds = False
                texts.append(f"{before} to {ranks_then} ranks: {outcome.event}: {outcome.reason}")
                continue
        theirs, mine = stage.losses(source), stage.losses(run)
        worst = max(abs(theirs[step] - mine[step]) for step in mine)
        apart = stage.apart(source, run)
        seen[f"{before}_to_{ranks_then}"] = {"loss_apart_nats": worst, "weights_apart_share": apart.weights_share}
        holds = holds and worst <= limit_nats and apart.weights_share <= limit_share and min(mine) == at + 1
        texts.append(
            f"{before} to {ranks_then} ranks after step {at}: losses within {worst:.1g} nats, weights within "
            f"{apart.weights_share:.1g} of their norm"
        )
    return judged(
        "world_size", holds, "; ".join(texts), seen=seen,
        limit=f"{limit_nats:g} nats at every step, {limit_share:g} of the weights' norm at the end",
        advice="do not change the number of ranks of this run; its checkpoints or its data order depend on it",
    )  # fmt: skip


def _of_the_copy(name: str) -> DrillResult:
    return DrillResult(
        name=name, outcome="skipped", seen={}, limit="as for the copy", needed=False,
        said="one device need not hold the real shape: this is for the scaled-down copy",
        advice="hold it without --full",
    )  # fmt: skip
