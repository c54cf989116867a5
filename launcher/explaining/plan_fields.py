"""Fields that the plan asks for as they are: the model's make, the launch, the data, the seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.explaining.facts import (
    NOT_HERE,
    Tested,
    alike,
    change_keys,
    decisive,
    from_plan,
    intervals_of,
    number,
    tests_of,
)
from launcher.explaining.known import Known
from launcher.explaining.leaves import Leaf
from launcher.explaining.record import Explained, Source, Strength
from launcher.study.gates import forecast_warnings
from launcher.views.transfer import size_name

Explainer = Callable[[Known, Leaf], Explained]

MODEL = {"family": "model.family", "tied": "model.tied", "qk_norm": "model.qk_norm", "seq_len": "model.seq_len"}
LAYOUT = (
    "data_parallel_shard", "data_parallel_replicate", "tensor", "pipeline", "context", "microbatch_sequences",
    "activation_checkpointing",
)  # fmt: skip
MONITORING = ("validate_every_steps", "layers_every_steps", "replay_every_steps")


def explained(leaf: Leaf, source: Source, strength: Strength, change: tuple[str, ...], **more: Any) -> Explained:
    """The record of a leaf; nothing is said of cost unless `more` does. A closed fit gate is warned of."""
    said = {"cost": None, "warnings": forecast_warnings(strength.gates), **more}
    return Explained(
        field=leaf.path, value=leaf.value, written=leaf.written, source=source, strength=strength, change=change, **said
    )  # fmt: skip


def of_model(known: Known, leaf: Leaf) -> Explained:
    """What every shape of the study shares."""
    key = MODEL[leaf.key.rpartition(".")[2]]
    strength = alike(known, f"{key} = {number(leaf.value)}")
    return explained(leaf, from_plan(known, leaf.value, key), strength, change_keys(known, key))


def layers(known: Known, leaf: Leaf) -> Explained:
    """`shape.num_layers`: asked for; runs speak of it where the learning rate was tested over depth."""
    keys = ("target.num_layers", "model.num_layers")
    source = from_plan(known, leaf.value, *keys)
    shape, base = known.decision.shape, known.decision.base_shape
    tests = tuple(one for one in tests_of(known, "learning_rate") if one.test["axis"] == "depth")
    if tests:
        strength = Strength(
            kind="measured", outcome=tests[0].verdict["outcome"], text="; ".join(one.words() for one in tests),
            intervals=intervals_of(tests), num_runs=tests[0].runs.num_runs, num_seeds=tests[0].num_seeds,
            extrapolation=tests[0].reach,
        )  # fmt: skip
    elif shape.num_layers == base.num_layers:
        strength = alike(known, f"num_layers = {base.num_layers}")
    else:
        strength = Strength(
            kind="assumed",
            text=f"the proxies have {base.num_layers} layers; the learning rate was not tested over depth, and the "
            "ladder's runs have theirs",
            extrapolation=shape.num_layers / base.num_layers,
        )
    change = (*decisive(known, tests), *change_keys(known, *keys))
    if known.evidence and not tests:
        change += ("plan key transfer.depths: the learning rate's valley over depth, which is not tested now",)
    return explained(leaf, source, strength, change, unknown=_shape_unknown())


def _shape_unknown() -> tuple[str, ...]:
    return ("what the same compute would buy with another number of layers: the ladder compares widths and durations",)


def batch(known: Known, leaf: Leaf) -> Explained:
    """`batch_tokens`: asked for; no stage looks for the best one."""
    keys = ("target.batch_tokens", "proxy.batch_tokens")
    tests = tuple(one for one in tests_of(known, "learning_rate") if one.test["axis"] == "batch")
    base = known.value_of("proxy.batch_tokens")
    if tests:
        text = f"a wish; how the rate follows it was tested: {'; '.join(one.words() for one in tests)}"
        strength = Strength(
            kind="measured", text=text, outcome=tests[0].verdict["outcome"], intervals=intervals_of(tests),
            num_runs=tests[0].runs.num_runs, num_seeds=tests[0].num_seeds, extrapolation=tests[0].reach,
        )  # fmt: skip
    elif (ladder := known.value_of("ladder.batch_tokens")) not in (None, 0, base):
        told = f"the proxies have {number(base)} tokens a step, the ladder's runs {number(ladder)}"
        strength = Strength(kind="assumed", text=f"{told}; the rate was not tested over batch")
    elif base in (None, leaf.value):
        strength = alike(known, f"a batch of {number(leaf.value)} tokens") if base else Strength(
            kind="unknown", text=f"whether the proxies had this batch: {NOT_HERE}"
        )  # fmt: skip
    else:
        strength = Strength(
            kind="assumed", extrapolation=known.decision.batch_tokens / base,
            text=f"the proxies have {number(base)} tokens a step, and the rate was not tested over batch",
        )  # fmt: skip
    change = (*decisive(known, tests), *change_keys(known, *keys))
    if known.evidence and not tests:
        change += ("plan key transfer.batches: the learning rate's valley over batch, which is not tested now",)
    return explained(leaf, from_plan(known, leaf.value, *keys), strength, change, cost=_along(tests))


def _along(tests: tuple[Tested, ...]) -> str | None:
    """What the base's shape reached at every batch, tokens in all being equal."""
    found = [
        f"{size_name(one.test['axis'], optimum['size'])} {number(optimum['loss_nats'])}"
        for one in tests
        for optimum in one.verdict["optima"]
        if optimum["loss_nats"] is not None
    ]
    return f"at the base's shape and equal tokens, each at its best rate, nats: {', '.join(found)}" if found else None


def layout(known: Known, leaf: Leaf) -> Explained:
    """Degrees of the mesh, and what a rank does with its share."""
    name = leaf.path.rpartition(".")[2]
    num_ranks = known.decision.parallelism.num_ranks
    if name in ("microbatch_sequences", "activation_checkpointing"):
        text = "memory for time, of the same step"
    elif known.layout:
        text = (
            f"the real shape was sharded so over a fake group of {known.layout['num_ranks']} ranks before it was "
            f"frozen, {number(sum(known.layout['local_parameters']))} parameters on rank 0; of speed and memory that "
            "says nothing"
        )
    else:
        text = f"a choice of how {num_ranks} ranks share the work; {NOT_HERE} whether the shape was sharded so"
    change = (
        f"`forerun estimate {known.folder}`: what a rank holds, time and money of these degrees",
        *change_keys(known, f"launch.{name}"),
    )
    unknown = ("how many tokens per second it gives: no run of these degrees was timed",)
    strength = Strength(kind="chosen", text=text)
    return explained(leaf, from_plan(known, leaf.value, f"launch.{name}"), strength, change, unknown=unknown)


def care(key: str) -> Explainer:
    """A cadence or a limit of the main run, by its plan key."""

    def said(known: Known, leaf: Leaf) -> Explained:
        strength = Strength(kind="chosen", text=f"a choice, which no proxy tries; {known.rehearsed}")
        change = (*change_keys(known, key), f"`forerun rehearse {known.folder}`: the drills")
        return explained(leaf, from_plan(known, leaf.value, key), strength, change)

    return said


def seed(known: Known, leaf: Leaf) -> Explained:
    """The main run's seed, and what luck is worth."""
    noise = noise_nats(known)
    text = "one of many: no run says which seed is lucky"
    cost = None
    if noise is not None:
        cost = f"another seed moves one run's loss by {number(noise)} nats (standard deviation, of the transfer runs)"
    strength = Strength(kind="chosen", text=text)
    return explained(
        leaf, from_plan(known, leaf.value, "launch.seed"), strength, change_keys(known, "launch.seed"), cost=cost,
        unknown=() if noise is not None else (f"how much a seed moves the loss: {NOT_HERE}",),
    )  # fmt: skip


def noise_nats(known: Known) -> float | None:
    """Standard deviation of one run about its valley: the largest that a test of the learning rate found."""
    found = [one.verdict["noise_nats"] for one in tests_of(known, "learning_rate")]
    return max((float(noise) for noise in found if noise is not None), default=None)


def precision(known: Known, leaf: Leaf) -> Explained:
    """Whether the proxies computed so too."""
    return _as_the_proxies(known, leaf, "launch.precision", "proxy.dtype")


def compiled(known: Known, leaf: Leaf) -> Explained:
    """Whether the proxies were compiled too."""
    return _as_the_proxies(known, leaf, "launch.compiled", "proxy.compiled")


def _as_the_proxies(known: Known, leaf: Leaf, key: str, theirs: str) -> Explained:
    had = known.value_of(theirs)
    if known.plan is None:
        strength = Strength(kind="unknown", text=f"how the proxies computed: {NOT_HERE}")
    elif had == "auto":
        text = f"{theirs} is auto: how each run computed is in report.json, under calibration"
        strength = Strength(kind="unknown", text=text)
    elif had == leaf.value:
        strength = alike(known, f"{theirs} = {number(had)}")
    else:
        told = f"the proxies have {theirs} = {number(had)}; none computed as this asks"
        strength = Strength(kind="assumed", text=told)
    change = (*change_keys(known, key, theirs), f"`forerun rehearse {known.folder}`: drills with these numerics")
    return explained(leaf, from_plan(known, leaf.value, key), strength, change)
