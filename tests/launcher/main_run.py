"""A tiny main run: a corpus of made-up sentences, a spec for the bank, and the decision that says
the same.
"""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest

from launcher.base import metrics
from launcher.base.policy import AbortPolicy, Checkpointing
from launcher.frozen.frozen import (
    SCHEMA_VERSION,
    Data,
    Decision,
    Parallelism,
    PredictedLoss,
    groups_of,
    learning_rate_of,
)
from launcher.frozen.frozen_folder import ATTESTED, write_frozen
from proxies.core.hyperparameters import Hparams
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec
from proxies.data.corpus import tokenize
from proxies.data.tokens import Manifest, read_manifest
from proxies.parametrization.parametrization import forward_numbers, parameter_table
from transfer.verdict.rules import TransferRule

QUIET_TORCH = pytest.mark.filterwarnings(
    "ignore::FutureWarning:torch", "ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"
)
"""What torch's sharding and checkpoints warn of among themselves; for a module's `pytestmark`."""
WARMING = Schedule(
    kind="cosine",
    num_steps=12,
    warmup_steps=3,
    final_fraction=0.1,
    batch_warmup_steps=5,
    batch_warmup_stages=2,
)
"""Its batches are such that two ranks can share them."""
SENTENCE = "the loss of a small model falls as far as its width and its data let it fall"


def write_attested(frozen_dir: Path, decision: Decision) -> Path:
    """Write a config with what freezing attests, all of it empty; returns the launch file."""
    return write_frozen(frozen_dir, decision, {kind: {} for kind in ATTESTED})


def write_corpus(folder: Path, seed: int = 0) -> Manifest:
    draw = random.Random(seed)
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(60):
        (source / f"{number:02d}.txt").write_text(" ".join(draw.choices(SENTENCE.split(), k=120)))
    return tokenize([source], folder / "tokens", validation_fraction=0.1)


def spec_of(data_id: str, **hparams: float) -> RunSpec:
    base = Shape(
        num_layers=2,
        width=16,
        num_heads=1,
        num_kv_heads=1,
        ffn_width=32,
        vocab_size=256,
        seq_len=32,
    )
    return RunSpec(
        optimizer="adamw",
        shape=base.at_width(32),
        base_shape=base,
        parametrization=named("mup"),
        hparams=Hparams(
            **{"learning_rate": 2**-5, "weight_decay": 0.1, "clip_norm": 0.5, **hparams}
        ),
        schedule=Schedule(kind="cosine", num_steps=12, warmup_steps=3, final_fraction=0.1),
        batch_tokens=8 * 32,
        data_id=data_id,
        seed=7,
        numerics=Numerics(),
    )


def decision_of(
    spec: RunSpec, manifest: Manifest, *, num_ranks: int = 1, every_steps: int = 4
) -> Decision:
    return Decision(
        schema_version=SCHEMA_VERSION,
        shape=spec.shape,
        base_shape=spec.base_shape,
        parametrization=spec.parametrization,
        transfer=(
            TransferRule(
                hyperparameter="learning_rate",
                axis="width",
                power=0.0,
                source="parametrization",
                outcome="holds",
                measured_power=0.01,
                measured_low=-0.05,
                measured_high=0.07,
                regret_nats=0.0004,
                regret_low_nats=0.0,
                regret_high_nats=0.002,
                level=0.9,
            ),
        ),
        forward=forward_numbers(spec),
        groups=groups_of(parameter_table(spec)),
        optimizer=spec.optimizer,
        learning_rate=learning_rate_of(spec.schedule),
        clip_norm=spec.hparams.clip_norm,
        batch_tokens=spec.batch_tokens,
        num_tokens=spec.num_tokens,
        data=Data(
            data_id=spec.data_id,
            tokenizer=manifest.tokenizer,
            vocab_size=manifest.vocab_size,
            num_train_tokens=manifest.num_tokens("train"),
            weights=(),
        ),
        seed=spec.seed,
        precision="float32",
        parallelism=Parallelism(data_parallel_shard=num_ranks),
        checkpointing=Checkpointing(every_steps=every_steps),
        predicted=PredictedLoss(
            loss_nats=2.5, low_nats=2.0, high_nats=3.0, level=0.9, extrapolation=10.0
        ),
        abort=AbortPolicy(on_non_finite=True, train_loss_above_nats=math.log(256) + 1),
    )


def tiny_decision(
    corpus: Path, *, num_ranks: int = 1, every_steps: int = 4, **hparams: float
) -> Decision:
    manifest = read_manifest(corpus)
    return decision_of(
        spec_of(manifest.data_id, **hparams), manifest, num_ranks=num_ranks, every_steps=every_steps
    )


def by_muon(corpus: Path) -> RunSpec:
    """The tiny run by Muon, in which no two kinds of parameter share a rate."""
    spec = spec_of(read_manifest(corpus).data_id, adamw_learning_rate=0.01, adamw_weight_decay=0.2)
    return dataclasses.replace(
        spec, optimizer="muon", parametrization=named("mup", muon_rate="match_rms_adamw")
    )


def all_choices(corpus: Path) -> RunSpec:
    """The tiny run with every choice made otherwise, at two layers over a base of one."""
    spec = spec_of(read_manifest(corpus).data_id)
    base = dataclasses.replace(spec.base_shape, num_layers=1, family="gpt2")
    return dataclasses.replace(
        spec,
        base_shape=base,
        shape=base.at_width(32).at_depth(2),
        parametrization=named("completep"),
        schedule=WARMING,
    )


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> training loss of a run, in nats."""
    return {
        line["step"]: line["train_loss_nats"]
        for line in metrics.read(run_dir)
        if "train_loss_nats" in line
    }
