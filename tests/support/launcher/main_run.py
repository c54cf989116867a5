"""Cases for tests of the main run: a corpus of generated sentences, the spec of a tiny run, and the
decision that freezes the same run.
"""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.frozen.frozen import (
    SCHEMA_VERSION,
    Data,
    Decision,
    Parallelism,
    PredictedLoss,
    build_groups,
    sample_learning_rate,
)
from forerun._launcher.main_run.frozen.frozen_folder import ATTESTED, write_frozen
from forerun._launcher.main_run.frozen.run_policies import AbortPolicy, Checkpointing
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.tokens import Manifest, read_manifest
from forerun._proxies.parametrization.parametrization import (
    compute_forward_numbers,
    compute_parameter_table,
)
from forerun._transfer.verdict.rules import TransferRule

QUIET_TORCH = pytest.mark.filterwarnings(
    "ignore::FutureWarning:torch", "ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"
)
"""Filters for the warnings of torch's sharding and checkpoints; for a module's `pytestmark`."""
WARMING = Schedule(
    kind="cosine",
    num_steps=12,
    warmup_steps=3,
    final_fraction=0.1,
    batch_warmup_steps=5,
    batch_warmup_stages=2,
)
"""A schedule whose batches grow in stages that two ranks can share evenly."""
SENTENCE = "the loss of a small model falls as far as its width and its data let it fall"


def write_attested(frozen_dir: Path, decision: Decision) -> Path:
    """Write a config with empty attested records; return the launch file."""
    return write_frozen(frozen_dir, decision, {kind: {} for kind in ATTESTED})


def write_corpus(folder: Path, seed: int = 0) -> Manifest:
    """Write sixty texts of random words and tokenize them by bytes; return the manifest."""
    draw = random.Random(seed)
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(60):
        (source / f"{number:02d}.txt").write_text(" ".join(draw.choices(SENTENCE.split(), k=120)))
    return tokenize([source], folder / "tokens", validation_fraction=0.1)


def make_spec(data_id: str, **hparams: float) -> RunSpec:
    """Return the spec of a run of twelve steps of eight sequences at twice the base width."""
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
        parametrization=get_parametrization("mup"),
        hparams=Hparams(
            **{"learning_rate": 2**-5, "weight_decay": 0.1, "clip_norm": 0.5, **hparams}
        ),
        schedule=Schedule(kind="cosine", num_steps=12, warmup_steps=3, final_fraction=0.1),
        batch_tokens=8 * 32,
        data_id=data_id,
        seed=7,
        numerics=Numerics(),
    )


def make_decision(
    spec: RunSpec, manifest: Manifest, *, num_ranks: int = 1, every_steps: int = 4
) -> Decision:
    """Return the decision that freezes a run, with a planted forecast of 2.5 nats [2.0, 3.0]."""
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
        forward=compute_forward_numbers(spec),
        groups=build_groups(compute_parameter_table(spec)),
        optimizer=spec.optimizer,
        learning_rate=sample_learning_rate(spec.schedule),
        clip_norm=spec.hparams.clip_norm,
        batch_tokens=spec.batch_tokens,
        num_tokens=spec.num_tokens,
        data=Data(
            data_id=spec.data_id,
            tokenizer=manifest.tokenizer,
            vocab_size=manifest.vocab_size,
            num_train_tokens=manifest.count_tokens("train"),
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


def make_tiny_decision(
    corpus: Path, *, num_ranks: int = 1, every_steps: int = 4, **hparams: float
) -> Decision:
    """Return the decision that freezes the run of `make_spec` on a corpus."""
    manifest = read_manifest(corpus)
    return make_decision(
        make_spec(manifest.data_id, **hparams),
        manifest,
        num_ranks=num_ranks,
        every_steps=every_steps,
    )


def make_muon_spec(corpus: Path) -> RunSpec:
    """Return the tiny run with Muon, where no two kinds of parameter share a learning rate."""
    spec = make_spec(
        read_manifest(corpus).data_id, adamw_learning_rate=0.01, adamw_weight_decay=0.2
    )
    return dataclasses.replace(
        spec,
        optimizer="muon",
        parametrization=get_parametrization("mup", muon_rate="match_rms_adamw"),
    )


def make_spec_with_all_choices(corpus: Path) -> RunSpec:
    """Return the tiny run with every choice unlike the default, at twice the base depth."""
    spec = make_spec(read_manifest(corpus).data_id)
    base = dataclasses.replace(spec.base_shape, num_layers=1, family="gpt2")
    return dataclasses.replace(
        spec,
        base_shape=base,
        shape=base.at_width(32).at_depth(2),
        parametrization=get_parametrization("completep"),
        schedule=WARMING,
    )


def read_losses(run_dir: Path) -> dict[int, float]:
    """Return a run's training loss by step, in nats."""
    return {
        line["step"]: line["train_loss_nats"]
        for line in metrics_file.read_lines(run_dir)
        if "train_loss_nats" in line
    }
