"""Tests of `forerun estimate`: the runs, hours, and memory of a study and of its main run."""

import dataclasses

import pytest
from main_run import make_decision, make_spec, write_attested, write_corpus
from tiny_study import COMMAND, make_result, run_forerun, run_json, write_plan, write_plan_with

from forerun._launcher.main_run.estimates.machine import (
    MFU_CONVENTION,
    MachineOptions,
    build_machine,
    make_exact,
)
from forerun._launcher.main_run.estimates.main_run import (
    MainRun,
    build_main_body,
    estimate_main,
    estimate_memory,
)
from forerun._launcher.main_run.estimates.reference_tables import MODELS
from forerun._launcher.main_run.estimates.utilization import STEPPING_SHARE
from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._launcher.study.calibration.study_cost import (
    COMMAND_SECONDS,
    Speeds,
    compute_stage_costs,
    count_workers,
    estimate_wall_hours,
)
from forerun._launcher.study.stages.study_folder import open_ledger, read_study
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.shape import Shape

LLAMA_405B = MainRun(
    shape=MODELS["llama-3.1-405b"].shape,
    num_tokens=15_600_000_000_000,
    batch_tokens=2**24,
    precision="bfloat16",
    layout=Parallelism(data_parallel_shard=128, tensor=8, pipeline=14),
    optimizer="adamw",
)
LLAMA_8B = MainRun(
    shape=MODELS["llama-3-8b"].shape,
    num_tokens=2**40,
    batch_tokens=2**22,
    precision="bfloat16",
    layout=Parallelism(data_parallel_shard=8, microbatch_sequences=1),
    optimizer="adamw",
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Path of the tiny study's plan, next to its corpus."""
    return write_plan(tmp_path_factory.mktemp("estimate"))


@pytest.fixture(scope="module")
def body(plan):
    """The answer of `forerun estimate` for the plan."""
    code, body = run_json("estimate", plan)
    assert code == 0
    return body


def test_estimate_counts_the_runs_of_each_stage(body):
    stages = {stage["stage"]: stage for stage in body["stages"]}
    assert list(stages) == ["check", "sweep", "transfer", "ladder"]
    assert stages["check"]["num_runs"] == [8, 8]  # 2 widths, 2 seeds, muP and standard form
    assert stages["sweep"]["num_runs"] == [4, 4]
    assert stages["ladder"]["num_runs"] == [13, 13]  # 9 rungs, two of them at two other rates
    # 16 over width, 4 in the control arm, 8 at each of two longer durations, and 9 more for the
    # clip norm, whose base runs are shared.
    min_runs, max_runs = stages["transfer"]["num_runs"]
    assert min_runs == 45 < max_runs
    # The ledger does not count the runs of the coordinate check.
    assert body["total"]["num_runs"] == [4 + min_runs + 13, 4 + max_runs + 13]
    for stage in stages.values():
        low, high = stage["core_hours"]["interval"]
        assert low < stage["core_hours"]["value"] < high
        assert stage["hours"]["value"] == stage["core_hours"]["value"]  # one worker, inline
    assert body["main_run"]["flops"]["six_nd"] == pytest.approx(2e9, rel=0.05)


def test_hours_are_for_one_worker_a_core(plan, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    # A worker with a quarter of a core is slower than a core: no more than 16 are counted.
    small_workers = ("--set", "cluster.backend=ray", "--set", "cluster.worker_cpus=0.25")
    code, body = run_json("estimate", plan, *small_workers)
    assert (code, body["num_workers"]) == (0, 16)
    for stage in body["stages"]:
        assert stage["hours"]["value"] == pytest.approx(stage["core_hours"]["value"] / 16)
    study = read_study(plan, tmp_path / "study", ("cluster.backend=ray",))
    assert count_workers(study, known=5) == 5, "a calibrated study recorded its number"
    changes = ("cluster.backend=ray", "cluster.num_workers=3")
    assert count_workers(read_study(plan, tmp_path / "study", changes), known=5) == 3


@pytest.mark.slow
def test_study_runs_as_many_as_estimated(plan, body, tmp_path):
    from forerun._launcher.study.experiments.ladder import build_stage_runs
    from forerun._launcher.study.experiments.transfer_results import load_transfer_result
    from forerun._launcher.study.stages.main_run_choice import build_ladder_runs
    from forerun._launcher.study.stages.study_folder import open_recorded_study

    assert run_forerun("run", plan, "--study", tmp_path / "study")[0] in (0, 3, 4)
    study, ledger = open_recorded_study(tmp_path / "study")
    ladder_runs = build_ladder_runs(study, load_transfer_result(study, ledger))
    ladder_ids = {spec.id for spec in build_stage_runs(study, ladder_runs)}
    results = ledger.get_results()
    ladder_results = [result for run_id, result in results.items() if run_id in ladder_ids]
    estimated = {stage["stage"]: stage for stage in body["stages"]}
    assert len(ladder_results) == estimated["ladder"]["num_runs"][0]
    min_runs, max_runs = estimated["transfer"]["num_runs"]
    num_search_runs = 4
    num_transfer_runs = len(results) - len(ladder_results) - num_search_runs
    assert min_runs <= num_transfer_runs <= max_runs
    flops = sum(result.flops for result in ladder_results)
    assert estimated["ladder"]["flops"]["value"] == pytest.approx(flops, rel=1e-6)


def estimate_main_run(plan, *changes, options=()):
    """Return the estimate of the main run with changes of the plan's launch section."""
    sets = [word for change in changes for word in ("--set", f"launch.{change}")]
    code, body = run_json("estimate", plan, *sets, *options)
    assert code == 0
    return body["main_run"]


def test_main_run_has_the_layout_of_the_launch_section(plan):
    default = estimate_main_run(plan)
    # A layout that takes less memory
    lean = estimate_main_run(plan, "microbatch_sequences=1", 'activation_checkpointing="full"')
    assert (default["machine"]["num_gpus"], default["parallelism"]["data_parallel_shard"]) == (2, 2)
    # A step of 4 sequences on 2 ranks
    for main_run, microbatch_sequences, num_microbatches in ((default, 2, 1), (lean, 1, 2)):
        layout = main_run["parallelism"]
        assert layout["microbatch_sequences"] == microbatch_sequences
        assert layout["num_microbatches"] == num_microbatches
    assert lean["parallelism"]["activation_checkpointing"] == "full"
    degrees = Parallelism(data_parallel_shard=2, activation_checkpointing="full")
    memory = estimate_memory(
        Shape(**default["shape"]), degrees, "float32", num_microbatches=2, optimizer="adamw"
    )
    assert lean["memory"]["total_bytes"] == memory.total_bytes < default["memory"]["total_bytes"]
    replicas = estimate_main_run(plan, "data_parallel_shard=1", "data_parallel_replicate=2")[
        "parallelism"
    ]
    assert (replicas["data_parallel_shard"], replicas["data_parallel_replicate"]) == (1, 2)


def has_warning(main_run, phrase):
    """Return whether a warning of the estimate contains the phrase."""
    return any(phrase in warning for warning in main_run["warnings"])


def test_layout_that_does_not_divide_the_model_gets_a_warning(plan):
    main_run = estimate_main_run(plan, "data_parallel_shard=1", "pipeline=3")
    assert (main_run["memory"], main_run["machine"]["num_gpus"]) == (None, 3)
    assert has_warning(main_run, "pipeline = 3 does not divide num_layers = 1")


def test_layout_for_another_number_of_gpus_gets_a_warning(plan):
    main_run = estimate_main_run(plan, options=("--gpus", 4))
    assert has_warning(main_run, "hours are for 4 GPUs, memory is for the layout's 2 ranks")
    assert not has_warning(estimate_main_run(plan), "layout")


def test_layout_that_does_not_fit_the_memory_gets_a_warning():
    recomputing = dataclasses.replace(LLAMA_8B.layout, activation_checkpointing="full")
    options = MachineOptions(num_gpus=8)
    body = build_main_body(estimate_main(LLAMA_8B, options))
    assert "GB a rank, 72 GB are free" in body["warnings"][0]
    body = build_main_body(
        estimate_main(dataclasses.replace(LLAMA_8B, layout=recomputing), options)
    )
    assert body["warnings"] == []


def test_estimate_of_llama_405b_agrees_with_its_published_cost():
    estimate = estimate_main(
        LLAMA_405B, MachineOptions(num_gpus=16_384, tokens_per_gpu_second=154.4)
    )
    body = build_main_body(estimate)
    assert body["flops"]["six_nd"] == pytest.approx(3.799e25, rel=1e-3)
    assert body["flops"]["causal"] == pytest.approx(3.937e25, rel=1e-3)
    model_card_gpu_hours = 30.84e6
    assert estimate.gpu_hours.value == pytest.approx(model_card_gpu_hours, rel=0.05)
    num_steps = LLAMA_405B.num_tokens / LLAMA_405B.batch_tokens
    # STEPPING_SHARE is the share of the paid hours in which the run trains.
    assert estimate.step_seconds.value * num_steps == pytest.approx(
        estimate.days.value * STEPPING_SHARE.value * 86_400
    )
    assert estimate.days.value == pytest.approx(estimate.gpu_hours.value / 16_384 / 24)
    assert estimate.days.low < estimate.days.value < estimate.days.high
    default_price_usd = 3.90  # of an H100 hour
    assert body["usd"]["value"] == pytest.approx(default_price_usd * estimate.gpu_hours.value)


def test_measured_throughput_gives_the_published_utilization():
    """torchtitan reports 6,667 tokens/s per H100 and 39 % MFU for Llama 3 8B, compiled."""
    estimate = estimate_main(
        LLAMA_8B, MachineOptions(num_gpus=8, tokens_per_gpu_second=6667.0, price_usd=2.0)
    )
    assert estimate.mfu.value == pytest.approx(0.390, abs=1e-3)
    hours = 2**40 / 6667 / 3600
    assert estimate.gpu_hours.value == pytest.approx(hours / STEPPING_SHARE.value)
    assert estimate.usd.value == pytest.approx(2 * estimate.gpu_hours.value)
    with pytest.raises(SpecError, match=r"2\.\d+ times the peak"):
        build_machine(MachineOptions(tokens_per_gpu_second=50_000.0), flops_per_token=5.79e10)


def test_all_bad_options_are_reported_at_once(plan):
    code, body = run_json("estimate", plan, "--gpu", "H10", "--price-usd", 0, "--gpus", 0)
    assert code == 2
    for phrase in ("num_gpus = 0", "price_usd = 0", "did you mean H100?"):
        assert any(phrase in problem for problem in body["problems"])


def test_frozen_config_is_estimated_as_frozen(tmp_path):
    manifest = write_corpus(tmp_path)
    decision = make_decision(make_spec(manifest.data_id), manifest, num_ranks=2)
    path = write_attested(tmp_path / "frozen", decision)
    code, body = run_json("estimate", path)
    assert code == 0
    assert body["digest"] == decision.digest
    main_run = body["main_run"]
    assert main_run["tokens"] == decision.num_tokens
    assert main_run["parallelism"]["data_parallel_shard"] == 2
    assert main_run["machine"]["num_gpus"] == 2
    assert "stages" not in body
    assert run_json("estimate", path, "--gpus", 4)[1]["main_run"]["machine"]["num_gpus"] == 4
    assert run_json("estimate", path, "--set", "target.budget_flops=1e12")[0] == 2
    path.write_text(path.read_text().replace('"batch_tokens": ', '"batch_tokens": 1'))
    assert run_json("estimate", path)[0] == 5


def test_muon_takes_less_memory_and_more_time_than_adamw():
    adamw, muon = LLAMA_8B, dataclasses.replace(LLAMA_8B, optimizer="muon")
    options = MachineOptions(gpu="H100", num_gpus=8, price_usd=None, tokens_per_gpu_second=None)
    with_adamw = estimate_main(adamw, options)
    with_muon = estimate_main(muon, options)
    # The matrix products of Muon add less than 1 % for an 8B model at 4M tokens a step.
    added_share = muon.optimizer_flops / adamw.flops[MFU_CONVENTION]
    assert 0.001 < added_share < 0.01
    assert with_muon.gpu_hours.value == pytest.approx(
        with_adamw.gpu_hours.value * (1 + added_share), rel=1e-6
    )
    assert with_muon.run.flops == with_adamw.run.flops

    # Muon stores two numbers a weight instead of three for the 6.5 of 8.03 billion parameters that
    # are in the blocks.
    assert 0.7 < muon.checkpoint_bytes / adamw.checkpoint_bytes < 0.76
    adamw_memory, muon_memory = (
        estimate_memory(LLAMA_8B.shape, LLAMA_8B.layout, "bfloat16", optimizer=name)
        for name in ("adamw", "muon")
    )
    assert muon_memory.optimizer_bytes < adamw_memory.optimizer_bytes
    measured = dataclasses.replace(options, tokens_per_gpu_second=10_000.0)
    assert estimate_main(adamw, measured).gpu_hours == estimate_main(muon, measured).gpu_hours


def test_wall_hours_include_the_start_of_the_users_command(tmp_path):
    """The start of a command takes an assumed time until a run is recorded: here it took 100 s."""
    (tmp_path / "trainer.py").touch()
    plan = write_plan_with(tmp_path, COMMAND % "python3")
    code, assumed = run_json("estimate", plan)
    min_runs, max_runs = assumed["total"]["num_runs"]
    study = read_study(plan, tmp_path / "study")
    assert code == 0 and COMMAND_SECONDS.source in assumed["wall_hours"]["source"]
    training = estimate_wall_hours(
        compute_stage_costs(study, Speeds()), num_workers=1, run_seconds=make_exact(0.0)
    )
    assert assumed["wall_hours"]["value"] == pytest.approx(
        training.value + COMMAND_SECONDS.value * min_runs / 3600
    )
    assert assumed["wall_hours"]["interval"][1] == pytest.approx(
        training.high + COMMAND_SECONDS.high * max_runs / 3600
    )

    # A recorded run replaces the assumption.
    spec = study.build_trial(study.space.lowest)
    with open_ledger(study) as ledger:
        ledger.commit(spec, dataclasses.replace(make_result(spec, 2.0), seconds=100.0))
    code, measured = run_json("estimate", plan)
    assert code == 0 and measured["total"]["hours"] == assumed["total"]["hours"]
    assert measured["wall_hours"]["value"] == pytest.approx(
        training.value + 100 * min_runs / 3600, rel=1e-3
    )
    assert "measured" in measured["wall_hours"]["source"]


ON_GPUS = (
    "--set",
    "cluster.backend=ray",
    "--set",
    "cluster.worker_gpus=1.0",
    "--set",
    "cluster.num_workers=8",
)
"""Options of a study whose eight workers have a GPU each."""


def test_wide_price_interval_warns_with_advice(tmp_path):
    """A study was once estimated at USD 295 [38, 3873] without a warning."""
    body = run_json("estimate", write_plan(tmp_path), *ON_GPUS)[1]
    low, high = body["total"]["usd"]["interval"]
    (warning,) = [text for text in body["warnings"] if "--study STUDY" in text]
    assert high > 10 * low and f"{high / low:.3g}" in warning
