"""`forerun estimate`: what a plan takes, against what its stages then run."""

import dataclasses

import pytest
from main_run import decision_of, spec_of, write_attested, write_corpus
from tiny_study import COMMAND, ask, ended, forerun, plan_with, write_plan

from launcher.base.reference import MODELS
from launcher.calibration.study_cost import (
    COMMAND_SECONDS,
    Speeds,
    num_workers,
    stages_of,
    wall_hours,
)
from launcher.estimates.machine import MFU_CONVENTION, MachineOptions, exactly, machine_of
from launcher.estimates.main_run import MainRun, estimate_main, main_body, memory_per_rank
from launcher.estimates.utilization import PROGRESS
from launcher.frozen.frozen import Parallelism
from launcher.study.study_folder import open_ledger, plan_study
from proxies.core.checks import SpecError
from proxies.core.shape import Shape

LLAMA = MainRun(
    shape=MODELS["llama-3.1-405b"].shape,
    num_tokens=15_600_000_000_000,
    batch_tokens=2**24,
    precision="bfloat16",
    layout=Parallelism(data_parallel_shard=128, tensor=8, pipeline=14),
    optimizer="adamw",
)
EIGHT = MainRun(
    shape=MODELS["llama-3-8b"].shape,
    num_tokens=2**40,
    batch_tokens=2**22,
    precision="bfloat16",
    layout=Parallelism(data_parallel_shard=8, microbatch_sequences=1),
    optimizer="adamw",
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return write_plan(tmp_path_factory.mktemp("estimate"))


@pytest.fixture(scope="module")
def body(plan):
    code, found = ask("estimate", plan)
    assert code == 0
    return found


def test_stages_are_counted_from_the_plan(body):
    stages = {stage["stage"]: stage for stage in body["stages"]}
    assert list(stages) == ["check", "sweep", "transfer", "ladder"]
    assert stages["check"]["num_runs"] == [8, 8]  # 2 widths, 2 seeds, muP and standard form
    assert stages["sweep"]["num_runs"] == [4, 4]
    assert stages["ladder"]["num_runs"] == [13, 13]  # 9 rungs, two of them at two other rates
    # 16 over width and 4 in the control arm; two longer durations of 8; two widths of 3 clips, the
    # base's own shared.
    least, most = stages["transfer"]["num_runs"]
    assert least == 45 < most
    # checks are no runs of the ledger
    assert body["total"]["num_runs"] == [4 + least + 13, 4 + most + 13]
    for stage in stages.values():
        low, high = stage["core_hours"]["interval"]
        assert low < stage["core_hours"]["value"] < high
        assert stage["hours"]["value"] == stage["core_hours"]["value"]  # one worker, inline
    assert body["main_run"]["flops"]["six_nd"] == pytest.approx(2e9, rel=0.05)


def test_hours_are_on_as_many_workers_as_there_is_room_for(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    small = ("--set", "cluster.backend=ray", "--set", "cluster.worker_cpus=0.25")
    code, found = ask("estimate", plan, *small)  # none is as fast as a core with less than one
    assert (code, found["num_workers"]) == (0, 16)
    for stage in found["stages"]:
        assert stage["hours"]["value"] == pytest.approx(stage["core_hours"]["value"] / 16)
    study = plan_study(plan, tmp_path / "study", ("cluster.backend=ray",))
    assert num_workers(study, known=5) == 5, "as many as a calibrated study had"
    assert (
        num_workers(
            plan_study(plan, tmp_path / "study", ("cluster.backend=ray", "cluster.num_workers=3")),
            5,
        )
        == 3
    )


@pytest.mark.slow
def test_the_study_runs_as_many(plan, body, tmp_path):
    from collections import Counter

    from launcher.experiments.ladder import stage_specs
    from launcher.experiments.transferred_values import transferred
    from launcher.study.decide import ladder_specs
    from launcher.study.study_folder import recorded

    assert forerun("run", plan, "--study", tmp_path / "study")[0] in (0, 3, 4)
    study, ledger = recorded(tmp_path / "study")
    ladder = {
        spec.id for spec in stage_specs(study, ladder_specs(study, transferred(study, ledger)))
    }
    results = ledger.results()
    estimated = {stage["stage"]: stage for stage in body["stages"]}
    found = Counter("ladder" if id in ladder else "other" for id in results)
    assert found["ladder"] == estimated["ladder"]["num_runs"][0]
    least, most = estimated["transfer"]["num_runs"]
    assert least + 4 <= found["other"] <= most + 4
    spent = sum(result.flops for id, result in results.items() if id in ladder)
    assert estimated["ladder"]["flops"]["value"] == pytest.approx(spent, rel=1e-6)


def laid_out(plan, *changes, options=()):
    sets = [word for change in changes for word in ("--set", f"launch.{change}")]
    code, body = ask("estimate", plan, *sets, *options)
    assert code == 0
    return body["main_run"]


def test_the_main_run_is_laid_out_as_the_plans_launch_section_says(plan):
    own, pieces = (
        laid_out(plan),
        laid_out(plan, "microbatch_sequences=1", 'activation_checkpointing="full"'),
    )
    assert (own["machine"]["num_gpus"], own["parallelism"]["data_parallel_shard"]) == (2, 2)
    held = [
        (m["parallelism"]["microbatch_sequences"], m["parallelism"]["num_microbatches"])
        for m in (own, pieces)
    ]
    assert held == [(2, 1), (1, 2)]  # 4 sequences a step on 2 ranks
    assert pieces["parallelism"]["activation_checkpointing"] == "full"
    degrees = Parallelism(data_parallel_shard=2, activation_checkpointing="full")
    wanted = memory_per_rank(
        Shape(**own["shape"]), degrees, "float32", num_microbatches=2, optimizer="adamw"
    )
    assert pieces["memory"]["total_bytes"] == wanted.total_bytes < own["memory"]["total_bytes"]
    replicas = laid_out(plan, "data_parallel_shard=1", "data_parallel_replicate=2")["parallelism"]
    assert (replicas["data_parallel_shard"], replicas["data_parallel_replicate"]) == (1, 2)


def test_a_layout_that_does_not_divide_or_fit_is_a_warning(plan):
    undivided = laid_out(plan, "data_parallel_shard=1", "pipeline=3")
    assert (undivided["memory"], undivided["machine"]["num_gpus"]) == (None, 3)
    assert any(
        "pipeline = 3 does not divide num_layers = 1" in said for said in undivided["warnings"]
    )
    four = laid_out(plan, options=("--gpus", 4))
    assert any(
        "hours are for 4 GPUs, memory is for the layout's 2 ranks" in said
        for said in four["warnings"]
    )
    assert not any("layout" in said for said in laid_out(plan)["warnings"])
    full = dataclasses.replace(
        EIGHT, layout=dataclasses.replace(EIGHT.layout, activation_checkpointing="full")
    )
    large, small = (
        main_body(estimate_main(run, MachineOptions(num_gpus=8)))["warnings"]
        for run in (EIGHT, full)
    )
    assert "GB a rank, 72 GB are free" in large[0]
    assert small == []


def test_llama_405b_as_it_was_run():
    found = estimate_main(LLAMA, MachineOptions(num_gpus=16_384, tokens_per_gpu_second=154.4))
    told = main_body(found)
    assert told["flops"]["six_nd"] == pytest.approx(3.799e25, rel=1e-3)
    assert told["flops"]["causal"] == pytest.approx(3.937e25, rel=1e-3)
    assert found.gpu_hours.value == pytest.approx(30.84e6, rel=0.05)  # its model card
    steps = LLAMA.num_tokens / LLAMA.batch_tokens
    assert found.step_seconds.value * steps == pytest.approx(
        found.days.value * PROGRESS.value * 86_400
    )
    assert found.days.value == pytest.approx(found.gpu_hours.value / 16_384 / 24)
    assert found.days.low < found.days.value < found.days.high
    assert told["usd"]["value"] == pytest.approx(3.90 * found.gpu_hours.value)


def test_a_measured_throughput_is_a_share_of_the_peak():
    """torchtitan, Llama 3 8B, compiled: 6,667 tokens a second and H100, which it calls 39 %."""
    found = estimate_main(
        EIGHT, MachineOptions(num_gpus=8, tokens_per_gpu_second=6667.0, price_usd=2.0)
    )
    assert found.mfu.value == pytest.approx(0.390, abs=1e-3)
    hours = 2**40 / 6667 / 3600
    assert found.gpu_hours.value == pytest.approx(hours / PROGRESS.value)
    assert found.usd.value == pytest.approx(2 * found.gpu_hours.value)
    with pytest.raises(SpecError, match=r"2\.\d+ times the peak"):
        machine_of(MachineOptions(tokens_per_gpu_second=50_000.0), 5.79e10)


def test_bad_options_are_said_at_once(plan):
    code, found = ask("estimate", plan, "--gpu", "H10", "--price-usd", 0, "--gpus", 0)
    assert code == 2
    for said in ("num_gpus = 0", "price_usd = 0", "did you mean H100?"):
        assert any(said in problem for problem in found["problems"])


def test_a_frozen_config_is_estimated_as_frozen(tmp_path):
    manifest = write_corpus(tmp_path)
    decision = decision_of(spec_of(manifest.data_id), manifest, num_ranks=2)
    path = write_attested(tmp_path / "frozen", decision)
    code, found = ask("estimate", path)
    assert code == 0
    assert found["digest"] == decision.digest
    main = found["main_run"]
    assert main["tokens"] == decision.num_tokens
    assert (main["parallelism"]["data_parallel_shard"], main["machine"]["num_gpus"]) == (2, 2)
    assert "stages" not in found
    assert ask("estimate", path, "--gpus", 4)[1]["main_run"]["machine"]["num_gpus"] == 4
    assert ask("estimate", path, "--set", "target.budget_flops=1e12")[0] == 2
    path.write_text(path.read_text().replace('"batch_tokens": ', '"batch_tokens": 1'))
    assert ask("estimate", path)[0] == 5


def test_muon_keeps_one_moment_of_matrices_and_its_products_take_time():
    adamw, muon = EIGHT, dataclasses.replace(EIGHT, optimizer="muon")
    options = MachineOptions(gpu="H100", num_gpus=8, price_usd=None, tokens_per_gpu_second=None)
    one, other = (estimate_main(run, options) for run in (adamw, muon))
    added = muon.optimizer_flops / adamw.flops[MFU_CONVENTION]
    assert 0.001 < added < 0.01  # an 8B model at four million tokens a step
    assert other.gpu_hours.value == pytest.approx(one.gpu_hours.value * (1 + added), rel=1e-6)
    assert other.run.flops == one.run.flops
    # Of three numbers a weight, two in the blocks: 6.5 of its 8.03 billion parameters are there.
    assert 0.7 < muon.checkpoint_bytes / adamw.checkpoint_bytes < 0.76
    held = [
        memory_per_rank(EIGHT.shape, EIGHT.layout, "bfloat16", optimizer=name)
        for name in ("adamw", "muon")
    ]
    assert held[1].optimizer_bytes < held[0].optimizer_bytes
    measured = dataclasses.replace(options, tokens_per_gpu_second=10_000.0)
    assert estimate_main(adamw, measured).gpu_hours == estimate_main(muon, measured).gpu_hours


def test_the_start_of_a_command_is_in_the_estimate_and_measured_once_it_ran(tmp_path):
    """A trainer that takes no time itself, in a process that takes 100 s: as assumed, then as its
    runs took.
    """
    (tmp_path / "trainer.py").touch()
    plan = plan_with(tmp_path, COMMAND % "python3")
    code, assumed = ask("estimate", plan)
    runs = assumed["total"]["num_runs"]
    own = COMMAND_SECONDS
    study, trained = plan_study(plan, tmp_path / "study"), assumed["total"]["hours"]
    assert code == 0 and own.source in assumed["wall_hours"]["source"]
    plain = wall_hours(stages_of(study, Speeds()), 1, exactly(0.0))
    assert assumed["wall_hours"]["value"] == pytest.approx(plain.value + own.value * runs[0] / 3600)
    assert assumed["wall_hours"]["interval"][1] == pytest.approx(
        plain.high + own.high * runs[1] / 3600
    )
    spec = study.trial(study.space.lowest)
    with open_ledger(study) as ledger:
        ledger.commit(spec, dataclasses.replace(ended(spec, 2.0), seconds=100.0))
    code, measured = ask("estimate", plan)
    assert code == 0 and measured["total"]["hours"] == trained
    assert measured["wall_hours"]["value"] == pytest.approx(
        plain.value + 100 * runs[0] / 3600, rel=1e-3
    )
    assert "measured" in measured["wall_hours"]["source"]
