"""What looks on while two ranks train: held against the whole weights, a planted fault, a slow
rank, a spike.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from types import SimpleNamespace

import pytest
import torch
from care_case import curve, events, train
from care_ranks import SLOW_SECONDS, Flipping
from main_run import QUIET_TORCH, tiny_decision

from launcher.base import chronicle, metrics
from launcher.base.policy import Monitoring
from launcher.trainer import rollback
from launcher.trainer.replay import ANOTHER_ORDER, Replay, difference, fingerprint
from proxies.core.shape import Shape
from proxies.model.decoder import Decoder, Multipliers
from proxies.model.loss import token_loss

pytestmark = QUIET_TORCH


def lines_with(run_dir, column):
    return {
        line["step"]: line[column]
        for line in metrics.read(run_dir)
        if column in line and "event" not in line
    }


@pytest.mark.parametrize("name", ["watched", "muon"])
def test_layers_of_two_ranks_are_those_of_the_whole_weights(two_ranks, name):
    told = lines_with(two_ranks / name / "run", "layers")
    ruler = json.loads((two_ranks / "ruler.json").read_text())[name]
    assert list(told) == [5, 10]
    for step, layers in told.items():
        assert (
            set(layers)
            == set(ruler[str(step)])
            == {"embedding", "layers.0", "layers.1", "norm", "readout"}
        )
        for layer, numbers in layers.items():
            assert numbers == pytest.approx(ruler[str(step)][layer], rel=1e-4), layer


def test_a_slow_rank_shows_though_all_steps_take_as_long(two_ranks):
    told = lines_with(two_ranks / "watched" / "run", "rank_seconds")
    assert list(told) == [10]
    fast, slow = told[10]
    assert 0 < fast < slow - 0.5 * SLOW_SECONDS
    assert slow < lines_with(two_ranks / "watched" / "run", "seconds")[10]


def test_validation_losses_on_the_way(two_ranks):
    run_dir = two_ranks / "watched" / "run"
    told = lines_with(run_dir, "validation_loss_nats")
    ending = metrics.read_ending(run_dir)
    assert ending.event == "finished"
    assert list(told) == [6, 12]
    assert told[12] == ending.validation_loss_nats < told[6]


def test_healthy_ranks_replay_without_a_word(two_ranks):
    replayed = events(two_ranks / "watched" / "run", "replayed")
    assert [line["step"] for line in replayed] == [2, 4, 6, 8, 10, 12]
    assert {line["difference"] for line in replayed} == {0.0}
    assert not chronicle.entries(two_ranks / "watched" / "run")


def test_a_flipped_bit_stops_the_run_and_names_the_rank(two_ranks):
    run_dir = two_ranks / "flipped" / "run"
    ending = metrics.read_ending(run_dir)
    assert (ending.event, ending.exit_code, ending.step) == ("aborted", 3, 5)
    host = socket.gethostname()
    assert f"at rank 1 on host {host}, before the update: exclude {host} " in ending.reason
    assert max(curve(run_dir)) == 5, "the update was not made"
    (entry,) = chronicle.entries(run_dir)
    assert (entry.kind, entry.step, entry.data["ranks"], entry.data["hosts"]) == (
        "quarantined",
        5,
        [1],
        [host],
    )
    assert events(run_dir, "replayed")[-1]["difference"] == entry.data["difference"] > 0


def test_two_ranks_go_back_together(two_ranks):
    run_dir = two_ranks / "back" / "run"
    assert metrics.read_ending(run_dir).event == "finished"
    (line,) = events(run_dir, "rolled_back")
    assert (line["to_step"], line["skipped_sequences"]) == (16, 80)
    assert list(curve(run_dir)) == list(range(1, 33))
    assert max(loss for step, (loss, _, _) in curve(run_dir).items() if step > 16) < 3
    assert (run_dir / rollback.ROLLBACKS_FILE).exists()


class FlippingAlone(Flipping):
    faulty = 0


def test_looking_on_changes_nothing_and_a_fault_is_not_stepped_on(one_rank, corpus, tmp_path):
    plain = tiny_decision(corpus)
    watched = dataclasses.replace(
        plain,
        monitoring=Monitoring(layers_every_steps=1, replay_every_steps=2, validate_every_steps=1),
    )
    train(plain, corpus, tmp_path / "plain")
    stopped = train(watched, corpus, tmp_path / "watched", build=FlippingAlone)
    assert (stopped.event, stopped.exit_code, stopped.step) == ("aborted", 3, 5)
    assert train(watched, corpus, tmp_path / "watched").event == "finished"  # on a healthy host
    assert curve(tmp_path / "watched" / "run") == curve(tmp_path / "plain" / "run")
    steps = [line["step"] for line in events(tmp_path / "watched" / "run", "replayed")]
    assert steps == [2, 4, 6, 8, 10, 12], "each once, though step 5 was reached twice"


@pytest.mark.parametrize(
    ("device", "precision", "allowed", "told"),
    [
        ("cpu", "float32", 0.0, 1e-9),
        ("cuda", "float32", 1e-5, 3e-5),
        ("cuda", "bfloat16", 5e-3, 1e-2),
    ],
)
def test_on_a_gpu_another_order_is_no_fault(one_rank, tmp_path, device, precision, allowed, told):
    replay = Replay(1)
    replay._run = SimpleNamespace(
        rank=0,
        num_ranks=1,
        run_dir=tmp_path,
        device=torch.device(device),
        decision=SimpleNamespace(digest="d" * 64, precision=precision),
    )
    assert replay._judge(3, [[allowed, allowed]]) is None
    assert (
        f"differ by {told:.3g} of their norm at rank 0" in replay._judge(4, [[told, told]]).reason
    )


def gradients_of(precision, rows):
    """Fingerprints of what a block's ranks would exchange, the batch's rows being in this order."""
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
    token_loss(
        model(ids[:, :-1], Multipliers(attention=shape.head_dim**-0.5)), ids[:, 1:]
    ).backward()
    return [
        fingerprint(
            torch.cat([parameter.grad.float().flatten() for parameter in block.parameters()])
        )
        for block in (*model.layers, model.lm_head)
    ]


@pytest.mark.parametrize("precision", ANOTHER_ORDER)
def test_the_same_rows_in_another_order_stay_within_what_is_allowed(precision):
    rows = torch.arange(8)
    plain = gradients_of(precision, rows)
    assert difference(plain, gradients_of(precision, rows)) == 0
    assert (
        0 < difference(plain, gradients_of(precision, rows.flip(0))) < ANOTHER_ORDER[precision] / 4
    )
    assert (
        difference(plain, gradients_of(precision, rows.clamp(min=1))) > ANOTHER_ORDER[precision]
    ), "another batch"
