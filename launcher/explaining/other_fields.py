"""Fields that follow from others, that this version of forerun fixes, or that the corpus and the schedule bring."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from launcher.explaining.facts import alike, change_keys, from_plan, gate_change, gate_words, key_words, number
from launcher.explaining.known import Known
from launcher.explaining.leaves import Leaf
from launcher.explaining.plan_fields import Explainer, explained
from launcher.explaining.record import Explained, Source, Strength
from launcher.explaining.tuned_fields import tuned_field
from proxies.core import canon
from proxies.core.schedule import Schedule, lr_multiplier, lr_table
from proxies.core.spec import DIVERGED_ABOVE_NATS

POLICY = {
    "spikes.rollback_steps": "PaLM went back about 100 steps (arXiv 2204.02311, section 5.1)",
    "spikes.skip_batches": "PaLM skipped 200 to 500 batches (arXiv 2204.02311, section 5.1)",
    "spikes.clip_share": "OPT lowered its clip from 1.0 to 0.3 (arXiv 2205.01068, section 2.5)",
}
_VERSION = "no plan key sets it: another version of forerun might freeze another"


def fixed(text: str = "") -> Explainer:
    """What no plan key sets; `text` says why it is so."""

    def said(known: Known, leaf: Leaf) -> Explained:
        field = next(f for f in dataclasses.fields(leaf.of) if f.name == leaf.key.rpartition(".")[2])  # type: ignore[arg-type]
        now = field.default
        default = "" if now is dataclasses.MISSING else (
            "this version's value" if canon.to_json(now) == leaf.value else f"this version's is {number(now)}"
        )  # fmt: skip
        words = "; ".join(part for part in (text or "forerun's own", default) if part)
        policy = POLICY.get(leaf.key)
        source = Source(kind="fixed", text=words, rules=(policy,) if policy else ())
        strength = Strength(
            kind="assumed" if policy else "chosen",
            text="others' practice; no run of this study tries it" if policy else "a convention; no run tries another",
        )
        return explained(leaf, source, strength, (_VERSION,))

    return said


def corpus(name: str) -> Explainer:
    """What the corpus's manifest says."""

    def said(known: Known, leaf: Leaf) -> Explained:
        source = Source(kind="corpus", text=f"the manifest of the corpus that data.path named: {name}")
        gates = known.gate("data") if leaf.key in ("data.num_train_tokens", "data.data_id") else ()
        strength = Strength(
            kind="exact",
            gates=gates,
            text="; ".join(filter(None, ("read from the shards' manifest", gate_words(gates)))),
        )
        change = (
            "`forerun tokenize SOURCE --out DIR` makes another corpus: other data make other runs",
            *gate_change(gates), *change_keys(known, "data.path"),
        )  # fmt: skip
        return explained(leaf, source, strength, change)

    return said


def weights(known: Known, leaf: Leaf) -> Explained:
    """Shares of the corpus's sources: the plan's, where it changes them."""
    source = from_plan(known, dict(leaf.value), "data.weights")  # type: ignore[arg-type]
    strength = alike(known, "these shares of the sources") if leaf.value else alike(known, "the corpus's own shares")
    return explained(leaf, source, strength, change_keys(known, "data.weights"))


def stop_above(known: Known, leaf: Leaf) -> Explained:
    """The brake on the training loss: that of knowing nothing, and a nat."""
    vocabulary = known.decision.shape.vocab_size
    rule = math.log(vocabulary) + DIVERGED_ABOVE_NATS
    text = f"ln({number(vocabulary)}) + {DIVERGED_ABOVE_NATS:g} = {rule:.6g}, the loss of knowing nothing and a nat"
    if not math.isclose(rule, float(leaf.value), rel_tol=1e-12):  # type: ignore[arg-type]
        text += f"; the frozen one is {number(leaf.value)}: another version's rule"
    source = Source(kind="derived", text=text, fields=("shape.vocab_size",))
    return explained(
        leaf, source, Strength(kind="exact", text="follows from the vocabulary; proxies stop by the same rule"),
        (_VERSION, "another vocabulary: another corpus"),
    )  # fmt: skip


def table(known: Known, leaf: Leaf) -> Explained:
    """Samples and hash of the learning rate's table: held against the schedule's own."""
    schedule = known.decision.learning_rate.schedule
    value: Any = leaf.value
    if isinstance(value, str):
        same = canon.content_id(list(lr_table(schedule))) == value
    else:
        same = all(lr_multiplier(schedule, step) == share for step, share in value)
    text = "this version makes the same of the schedule" if same else "this version makes another of the schedule"
    source = Source(kind="derived", text=f"computed from the schedule at its steps; {text}",
                    fields=("learning_rate.schedule",))  # fmt: skip
    strength = Strength(kind="exact", text=f"computed again here, {text}")
    return explained(leaf, source, strength, ("what changes the schedule: `forerun explain FROZEN schedule`",))


def warmup(known: Known, leaf: Leaf) -> Explained:
    """`warmup_steps`: the searched share of the steps."""
    schedule = known.decision.learning_rate.schedule
    share = int(leaf.value) / schedule.num_steps  # type: ignore[arg-type]
    by = f"{number(leaf.value)} of {number(schedule.num_steps)} steps, {share:.3g} of them"
    return tuned_field(known, leaf, "warmup_fraction", by=by)


def shared(*keys: str, of: str = "", where: str = "") -> Explainer:
    """A plan key that all runs share, `where` they do; `of`: what it is a share of the steps for."""

    def said(known: Known, leaf: Leaf) -> Explained:
        by = ""
        if of:
            schedule = leaf.of
            assert isinstance(schedule, Schedule)
            by = f"{of}, of {number(schedule.num_steps)} steps: {number(leaf.value)}"
        source = from_plan(known, leaf.value, *keys, by=by, fields=("learning_rate.schedule.num_steps",) if of else ())
        return explained(leaf, source, alike(known, key_words(source.plan_keys[-1]) + where), change_keys(known, *keys))

    return said


def stages(known: Known, leaf: Leaf) -> Explained:
    """`batch_warmup_stages`: 1 where the batch does not warm up, whatever the plan's number of stages."""
    keys = ("proxy.batch_warmup_fraction", "proxy.batch_warmup_stages")
    ramps = known.decision.learning_rate.schedule.batch_warmup_steps > 0
    key = keys[1] if ramps else keys[0]
    by = "" if ramps else "the batch does not warm up, so it has one stage"
    source = from_plan(known, leaf.value, key, by=by)
    return explained(leaf, source, alike(known, "as many stages of the batch"), change_keys(known, *keys))


def decay_form(known: Known, leaf: Leaf) -> Explained:
    """How the decay enters a step."""
    return fixed("torch AdamW's: a step multiplies a weight by 1 - lr(t) x weight decay")(known, leaf)
