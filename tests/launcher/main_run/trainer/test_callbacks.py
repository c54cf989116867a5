"""Tests of the trainer's callbacks on two ranks.

The callbacks log numbers of each layer and the times of the ranks, replay steps to notice faulty
hardware, and roll back after a spike of the loss.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from types import SimpleNamespace

import pytest
import torch
from hook_ranks import SLOW_SECONDS, FlippingTrainer
from main_run import QUIET_TORCH, make_tiny_decision
from spike_case import read_curve, read_events, train

from forerun._launcher.main_run import event_log, metrics_file
from forerun._launcher.main_run.frozen.run_policies import Monitoring
from forerun._launcher.main_run.trainer import rollback
from forerun._launcher.main_run.trainer.replay import (
    MAX_REORDERED,
    RankDifference,
    Replay,
    compute_difference,
    compute_fingerprint,
)
from forerun._proxies.core.shape import Shape
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.model.loss import compute_token_loss

pytestmark = QUIET_TORCH


def read_column(run_dir, column):
    """Return the values of a column by step."""
    return {
        line["step"]: line[column]
        for line in metrics_file.read_lines(run_dir)
        if column in line and "event" not in line
    }


@pytest.mark.parametrize("name", ["monitored", "muon"])
def test_layer_telemetry_of_two_ranks_equals_that_of_the_full_weights(two_rank_runs, name):
    logged = read_column(two_rank_runs / name / "run", "layers")
    reference = json.loads((two_rank_runs / "reference.json").read_text())[name]
    assert list(logged) == [5, 10]
    for step, layers in logged.items():
        assert (
            set(layers)
            == set(reference[str(step)])
            == {"embedding", "layers.0", "layers.1", "norm", "readout"}
        )
        for layer, numbers in layers.items():
            assert numbers == pytest.approx(reference[str(step)][layer], rel=1e-4), layer


def test_slow_rank_is_visible_in_the_times_of_ranks(two_rank_runs):
    rank_seconds = read_column(two_rank_runs / "monitored" / "run", "rank_seconds")
    assert list(rank_seconds) == [10]
    fast, slow = rank_seconds[10]
    assert 0 < fast < slow - 0.5 * SLOW_SECONDS
    assert slow < read_column(two_rank_runs / "monitored" / "run", "seconds")[10]


def test_validation_losses_are_logged_during_the_run(two_rank_runs):
    run_dir = two_rank_runs / "monitored" / "run"
    losses = read_column(run_dir, "validation_loss_nats")
    ending = metrics_file.read_ending(run_dir)
    assert ending.event == "finished"
    assert list(losses) == [6, 12]
    assert losses[12] == ending.validation_loss_nats < losses[6]


def test_replay_of_healthy_ranks_finds_no_difference(two_rank_runs):
    replayed = read_events(two_rank_runs / "monitored" / "run", "replayed")
    assert [line["step"] for line in replayed] == [2, 4, 6, 8, 10, 12]
    assert {line["difference"] for line in replayed} == {0.0}
    assert not event_log.read_events(two_rank_runs / "monitored" / "run")


def test_flipped_bit_stops_the_run_and_names_the_rank(two_rank_runs):
    run_dir = two_rank_runs / "flipped bit" / "run"
    ending = metrics_file.read_ending(run_dir)
    assert (ending.event, ending.exit_code, ending.step) == ("aborted", 3, 5)
    host = socket.gethostname()
    assert f"at rank 1 on host {host}, before the update: exclude {host} " in ending.reason
    assert max(read_curve(run_dir)) == 5, "the update was not made"
    (entry,) = event_log.read_events(run_dir)
    assert (entry.kind, entry.step, entry.data["ranks"], entry.data["hosts"]) == (
        "quarantined",
        5,
        [1],
        [host],
    )
    assert read_events(run_dir, "replayed")[-1]["difference"] == entry.data["difference"] > 0


def test_two_ranks_roll_back_together(two_rank_runs):
    run_dir = two_rank_runs / "rolled back" / "run"
    assert metrics_file.read_ending(run_dir).event == "finished"
    (line,) = read_events(run_dir, "rolled_back")
    assert (line["to_step"], line["skipped_sequences"]) == (16, 80)
    assert list(read_curve(run_dir)) == list(range(1, 33))
    assert max(loss for step, (loss, _, _) in read_curve(run_dir).items() if step > 16) < 3
    assert (run_dir / rollback.ROLLBACKS_FILE).exists()


class OneRankFlippingTrainer(FlippingTrainer):
    """A trainer that flips a bit on its only rank."""

    faulty = 0
    """Rank that flips the bit, which `FlippingTrainer` reads."""


def test_monitoring_changes_no_loss_and_a_faulty_step_is_not_made(one_rank, corpus, tmp_path):
    plain = make_tiny_decision(corpus)
    watched = dataclasses.replace(
        plain,
        monitoring=Monitoring(layers_every_steps=1, replay_every_steps=2, validate_every_steps=1),
    )
    train(plain, corpus, tmp_path / "plain")
    stopped = train(watched, corpus, tmp_path / "watched", build=OneRankFlippingTrainer)
    assert (stopped.event, stopped.exit_code, stopped.step) == ("aborted", 3, 5)
    assert train(watched, corpus, tmp_path / "watched").event == "finished", "on a healthy host"
    assert read_curve(tmp_path / "watched" / "run") == read_curve(tmp_path / "plain" / "run")
    steps = [line["step"] for line in read_events(tmp_path / "watched" / "run", "replayed")]
    assert steps == [2, 4, 6, 8, 10, 12], "each step once, though step 5 was reached twice"


@pytest.mark.parametrize(
    ("device", "precision", "allowed_difference", "faulty_difference"),
    [
        ("cpu", "float32", 0.0, 1e-9),
        ("cuda", "float32", 1e-5, 3e-5),
        ("cuda", "bfloat16", 5e-3, 1e-2),
    ],
)
def test_rounding_of_another_summation_order_is_no_fault_on_a_gpu(
    device, precision, allowed_difference, faulty_difference
):
    replay = Replay(1)
    replay.run = SimpleNamespace(
        device=torch.device(device),
        decision=SimpleNamespace(precision=precision),
        log=lambda line: None,
        record_event=lambda *event, **data: None,
    )
    assert replay._judge(3, [RankDifference("a", allowed_difference, allowed_difference)]) is None
    problem = replay._judge(4, [RankDifference("a", faulty_difference, faulty_difference)])
    assert f"differ by {faulty_difference:.3g} of their norm at rank 0" in problem


def compute_fingerprints(precision, rows):
    """Return the fingerprints of each block's gradients of a batch with these rows, in this order.

    A fingerprint is a short vector by which a replay compares gradients.
    """
    shape = Shape(
        num_layers=2,
        width=64,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=128,
        vocab_size=512,
        seq_len=128,
    )
    model, draw = Decoder(shape), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, generator=draw) * parameter.shape[-1] ** -0.5
            )
    ids = torch.randint(shape.vocab_size, (8, shape.seq_len + 1), generator=draw)[rows]
    model.to(getattr(torch, precision))
    logits = model(ids[:, :-1], Multipliers(attention=shape.head_dim**-0.5))
    compute_token_loss(logits, ids[:, 1:]).backward()
    return [
        compute_fingerprint(
            torch.cat([parameter.grad.float().flatten() for parameter in block.parameters()])
        )
        for block in (*model.layers, model.lm_head)
    ]


@pytest.mark.parametrize("precision", MAX_REORDERED)
def test_row_order_changes_gradients_less_than_the_tolerance_and_another_batch_more(precision):
    rows = torch.arange(8)
    plain = compute_fingerprints(precision, rows)
    same = compute_fingerprints(precision, rows)
    reordered = compute_fingerprints(precision, rows.flip(0))
    # The second row in place of the first
    other_batch = compute_fingerprints(precision, rows.clamp(min=1))
    assert compute_difference(plain, same) == 0
    assert 0 < compute_difference(plain, reordered) < MAX_REORDERED[precision] / 4
    assert compute_difference(plain, other_batch) > MAX_REORDERED[precision]
