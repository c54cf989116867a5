"""Fields that the ladder's fit decides: size, tokens, steps, and the loss that is expected."""

from __future__ import annotations

from typing import Any

from launcher.explaining.facts import (
    NOT_HERE,
    alike,
    change_keys,
    ends,
    from_plan,
    gate_change,
    gate_words,
    key_words,
    number,
)
from launcher.explaining.known import Known
from launcher.explaining.leaves import Leaf
from launcher.explaining.plan_fields import Explainer, explained
from launcher.explaining.record import Explained, Interval, Runs, Source, Strength
from launcher.views.transfer import short_size

TARGET = ("target.budget_flops", "target.width_multiple")


def ladder_runs(known: Known) -> tuple[Runs, ...]:
    """The ladder's; none where the evidence does not say."""
    if not known.fit:
        return ()
    ids = tuple((known.provenance.get("runs") or {}).get("ladder", ()))
    seeds = known.value_of("ladder.num_seeds")
    return (Runs(what="ladder", num_runs=known.fit["num_runs"], num_seeds=seeds, ids=ids),)


def fit_words(known: Known) -> str:
    """The laws by weight, and of how many runs."""
    if not known.fit:
        return f"the fit of the ladder ({NOT_HERE} of which runs and laws)"
    laws = ", ".join(f"{m['form']} {m['weight']:.0%}" for m in known.fit["members"] if m["weight"] > 0)
    return f"the fit of {known.fit['num_runs']} ladder runs ({laws or known.fit['form']}; {known.fit['status']})"


def width(known: Known, leaf: Leaf) -> Explained:
    """`shape.width`: the fitted best size for the budget, made whole."""
    choice = known.provenance.get("choice")
    keys = tuple(known.asked(key) for key in TARGET)
    text = f"the best size for the budget by {fit_words(known)}"
    if choice:
        best = choice["allocation"]
        text += (
            f": {short_size(round(best['params']))} parameters {_ends(best['params_interval'])} at "
            f"{number(float(choice['budget_flops']))} FLOPs; as a whole shape {number(choice['params'])}"
        )
        text += f"; {traded}" if (traded := choice.get("shape_traded")) else ""
    text += "; " + ", ".join(key_words(key) for key in keys)
    source = Source(kind="fit", text=text, plan_keys=keys, runs=ladder_runs(known))
    return explained(
        leaf, source, _strength(known, _size_intervals(known)), _change(known, *TARGET), cost=_flat(known),
        unknown=_unknown(known),
    )  # fmt: skip


def by_width(*keys: str) -> Explainer:
    """A size that goes with the width, by plan keys of the model's make."""

    def said(known: Known, leaf: Leaf) -> Explained:
        here = leaf.key.partition(".")[0]
        by = f"with {here}.width = {number(getattr(known.decision, here).width)}"
        source = from_plan(known, leaf.value, *keys, by=by, fields=(f"{here}.width",))
        made = Source(kind="derived", text=source.text, plan_keys=source.plan_keys, fields=source.fields)
        if here == "base_shape":
            strength = alike(known, f"{key_words(source.plan_keys[-1])} at its base")
            return explained(leaf, made, strength, change_keys(known, *keys))
        strength = _strength(known, _size_intervals(known), before="follows from the width")
        return explained(
            leaf, made, strength, (*_change(known, *TARGET), *change_keys(known, *keys)), cost=_flat(known)
        )

    return said


def duration(known: Known, leaf: Leaf) -> Explained:
    """`num_tokens` and `num_steps`: what the budget leaves at the chosen size."""
    choice, schedule = known.provenance.get("choice"), known.decision.learning_rate.schedule
    keys = (known.asked("target.budget_flops"),)
    text = f"the budget over 6 x parameters x batch, in whole steps; the size is of {fit_words(known)}"
    text += f"; {key_words(keys[0])}"
    if choice:
        best = choice["allocation"]
        text += f"; the optimum itself has {short_size(round(best['tokens']))} tokens {_ends(best['tokens_interval'])}"
    most = "up to " if schedule.batch_warmup_steps else ""
    text += f"; {number(schedule.num_steps)} steps of {most}{number(known.decision.batch_tokens)} tokens"
    source = Source(
        kind="fit", text=text, plan_keys=keys, runs=ladder_runs(known), fields=("shape", "batch_tokens")
    )  # fmt: skip
    strength = _strength(known, _size_intervals(known), data=leaf.key == "num_tokens")
    return explained(
        leaf, source, strength, (*_change(known, "target.budget_flops"), *change_keys(known, "target.batch_tokens")),
        cost=_flat(known), unknown=_unknown(known),
    )  # fmt: skip


def expected(known: Known, leaf: Leaf) -> Explained:
    """The forecast of the end, its interval, and how far it reaches."""
    p, d = known.decision.predicted, known.decision
    text = f"foretold by {fit_words(known)} for {number(d.num_tokens)} tokens at width {d.shape.width}"
    shift = ((known.provenance.get("ladder") or {}).get("sensitivity") or {}).get("shift_nats")
    if shift:
        text += (
            f"; were every rung at its best rate it would move by {shift['value']:+.4f} nats {_ends(shift['interval'])}"
        )
    source = Source(kind="fit", text=text, runs=ladder_runs(known), fields=("shape", "num_tokens"))
    mine = (Interval(of="nats, for one new run", low=p.low_nats, high=p.high_nats, level=p.level),)
    return explained(leaf, source, _strength(known, mine), _change(known, *TARGET), unknown=_unknown(known))


def level(known: Known, leaf: Leaf) -> Explained:
    """Of every interval: a plan key."""
    strength = Strength(kind="chosen", text="how sure an interval is to be; no run shows it wrong")
    return explained(
        leaf, from_plan(known, leaf.value, "transfer.level"), strength, change_keys(known, "transfer.level")
    )


def on_the_way(known: Known, leaf: Leaf) -> Explained:
    """The expected curve, and how fast a departure from it is forgotten."""
    curve = leaf.key == "predicted.curve"
    text = "the ladder's own loss curves over their ends, regressed on size and tokens (arXiv 2507.02119)"
    if not curve:
        text = "how fast the ladder's own loss curves forget a departure from their common course"
    if leaf.value in (None, []):
        text = "the ladder has too few runs, or too few shorter ones, to say"
    source = Source(kind="fit", text=text, runs=ladder_runs(known), fields=("predicted.loss_nats",))
    before = "the band counts how far such curves missed the ladder's longest runs" if curve and leaf.value else ""
    strength = _strength(known, (), before=before)
    return explained(leaf, source, strength, _change(known, "ladder.num_steps", "ladder.widths"))


def _size_intervals(known: Known) -> tuple[Interval, ...]:
    choice = known.provenance.get("choice")
    if not choice:
        return ()
    best = choice["allocation"]
    return tuple(
        Interval(of=f"{what} at the optimum", low=best[key][0], high=best[key][1], level=best["level"])
        for what, key in (("parameters", "params_interval"), ("tokens", "tokens_interval"))
        if best[key] is not None
    )


def _strength(known: Known, intervals: tuple[Interval, ...], before: str = "", *, data: bool = False) -> Strength:
    """The fit's gate, its back-test, and how far beyond the ladder the launch lies."""
    gates = (*known.gate("fit"), *known.gate("ladder_tuned"), *(known.gate("data") if data else ()))
    backtest: Any = known.fit.get("backtest")
    reach = known.decision.predicted.extrapolation
    said = [before] if before else []
    if backtest:
        said.append(
            f"the largest rungs held out ({backtest['num_held_out']}) were foretold within "
            f"{backtest['largest_error']:.2%}, {backtest['num_covered'] or 0} inside the interval"
        )
    elif known.fit:
        said.append("no rung was held out")
    said += [f"{number(i.of)} {ends((i.low, i.high))} at level {i.level:g}" for i in intervals]
    said.append(f"{reach:.3g} times the largest rung's FLOPs")
    said.append(gate_words(gates) or f"gates: {NOT_HERE}")
    return Strength(
        kind="measured" if known.fit else "unknown", text="; ".join(said), gates=gates, intervals=intervals,
        num_runs=known.fit.get("num_runs"), num_seeds=known.value_of("ladder.num_seeds"), extrapolation=reach,
    )  # fmt: skip


def _change(known: Known, *keys: str) -> tuple[str, ...]:
    """What the gates found, the rungs that would narrow the interval most, and the keys."""
    gates = (*known.gate("fit"), *known.gate("ladder_tuned"))
    said = list(gate_change(gates))
    advice = known.provenance.get("next_runs") or {}
    said += [
        f"a rung of width about {run['width']} at {short_size(round(run['tokens']))} tokens (plan keys ladder.widths, "
        f"ladder.num_steps) is expected to narrow the loss's interval by {run['interval_shrink']:.0%}, for "
        f"{run['budget_share']:.2g} of the main run's compute"
        for run in advice.get("runs", ())
    ]
    said += [f"hangs on: {words}" for words in (known.fit.get("influence") or {}).get("warnings", ())]
    return (*said, *change_keys(known, *keys))


def _flat(known: Known) -> str | None:
    """Sizes that are about as good."""
    choice = known.provenance.get("choice")
    if not choice:
        return None
    flat = choice["allocation"]["flat_range"]
    if not flat["params"][0] <= choice["params"] <= flat["params"][1]:
        return "not determined: the size chosen lies outside what the fit takes for about as good"
    params, tokens = ([short_size(round(end)) for end in flat[key]] for key in ("params", "tokens"))
    return (
        f"by the fit, {params[0]} to {params[1]} parameters ({tokens[0]} to {tokens[1]} tokens) on the same compute "
        "lose at most 0.3 % of the loss"
    )


def _unknown(known: Known) -> tuple[str, ...]:
    reach = known.decision.predicted.extrapolation
    said = [f"whether the law holds so far out: no run lies beyond the largest rung, {reach:.3g} times smaller"]
    return tuple(said if reach > 1 else []) + (() if known.fit else (f"laws, back-test and runs: {NOT_HERE}",))


def _ends(interval: Any) -> str:
    if interval is None:
        return "[not determined]"
    low, high = (short_size(round(end)) if end > 1000 else number(float(end)) for end in interval)
    return f"[{low}, {high}]"
