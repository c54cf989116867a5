"""Tests of `forerun explain FROZEN [FIELD]`, which explains the fields of a frozen launch config.

The explanation of a field names the source of its value (the plan, a default, the search, a rule),
the strength of the evidence for it, and how to change it. It is called provenance: `freeze` writes
it next to the config, and `explain` reads it from there.
"""

import copy
import dataclasses
import json
import re
import shutil
import sqlite3
import subprocess
import sys

import click
import pytest
from export_case import list_leaf_fields
from tiny_study import GATES, run_json, set_gates

from forerun._launcher.cli.cli import cli
from forerun._launcher.main_run.frozen.launch_file import attest, read_attestation, read_launch
from forerun._launcher.report.explanations.context import collect_context
from forerun._launcher.report.explanations.field_provenance import find_fields, list_fields
from forerun._launcher.report.explanations.origins import find_origin
from forerun._launcher.report.explanations.provenance import build_provenance
from forerun._launcher.report.explanations.text import format_field, format_field_table
from forerun._launcher.report.page.report_builder import build_report
from forerun._launcher.report.views.finding import Estimate
from forerun._launcher.report.views.report_model import to_report
from forerun._launcher.report.views.transfer_findings import Bend
from forerun._launcher.study.stages import study_findings
from forerun._launcher.study.stages.study_folder import read_recorded_study
from forerun._sweeps.store.ledger import Ledger


@pytest.fixture(scope="module")
def study_dir(frozen_study):
    """Folder of a study with one frozen config; tests must not change it."""
    return frozen_study


@pytest.fixture(scope="module")
def config(study_dir):
    """Folder of the frozen config, which is named by its digest."""
    (folder,) = (study_dir / "frozen").iterdir()
    return folder


@pytest.fixture(scope="module")
def fields(config):
    """JSON of each field, by name, as `forerun explain --json` prints it."""
    code, body = run_json("explain", config)
    assert (code, body["digest"]) == (0, config.name)
    return {field["field"]: field for field in body["fields"]}


@pytest.fixture(scope="module")
def context(study_dir, config):
    """Plan, results, report, and decision of the study when it was frozen."""
    study, ledger = read_recorded_study(study_dir), Ledger.read(study_dir)
    with pytest.MonkeyPatch.context() as patch:
        set_gates(patch)
        findings = study_findings.gather_findings(study, ledger)
    report = build_report(study, ledger, findings)
    return collect_context(study, findings, read_launch(config), report)


def change_report(context, **changes):
    """Return the context with parts of its report replaced; a dictionary is merged into a part."""
    report = context.report.to_json()
    for part, value in changes.items():
        report[part] = {**report[part], **value} if isinstance(value, dict) else value
    return dataclasses.replace(context, report=to_report(report))


def build_records(context):
    """Return the provenance records by field."""
    return {record.field: record for record in build_provenance(context)}


def test_every_field_has_the_value_of_the_launch_file(config, fields):
    decision = json.loads((config / "launch.json").read_text())["decision"]
    for name, value in decision["shape"].items():
        assert fields[f"shape.{name}"]["value"] == value
    assert fields["groups.embedding.init_std"]["value"] == decision["groups"][0]["init_std"]
    for name in ("seed", "clip_norm"):
        assert fields[name]["value"] == decision[name]
    assert fields["spikes.threshold"]["value"] == 6.0, "the file leaves out the default"


SOURCES_WITH_PLAN_KEYS = ("plan", "default", "search")
"""Kinds of source whose explanation must name the keys of the plan that set the value."""


def check_sentences(text):
    """Assert that a text is sentences or a formula, with at most one semicolon in each sentence.

    A formula begins with a function or with a ratio to the base model: m_N for the width, m_L for
    the depth, m_B for the batch, m_D for the duration.
    """
    assert re.match(r"[A-Z0-9]|ln\(|sqrt\(|m_[NLBD]", text), text
    # The screen adds the period at the end.
    assert not text.endswith((".", ";")), text
    without_parentheses = re.sub(r"\([^()]*\)", "", text)
    assert all(part.count(";") <= 1 for part in without_parentheses.split(". ")), text


def test_every_field_has_a_source_a_strength_and_valid_commands(fields):
    click_context = click.Context(cli)
    verbs = set()
    for name, field in fields.items():
        source, strength = field["source"], field["strength"]
        assert source["text"] and strength["text"] and all(field["change"]), name
        assert source["plan_keys"] or source["kind"] not in SOURCES_WITH_PLAN_KEYS, name
        check_sentences(source["text"])
        check_sentences(strength["text"])
        text = source["text"] + strength["text"] + "".join(field["change"])
        # A missing value and an unfilled placeholder would be visible as these texts.
        assert "None" not in text and "{}." not in text, name

        # Every command in the text is a verb with its options.
        for command in re.findall(r"`forerun ([^`]+)`", text):
            verb, *words = command.split()
            click_command = cli.get_command(click_context, verb)
            assert click_command is not None, command
            options = {option for parameter in click_command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options, command
            verbs.add(verb)
    assert verbs >= {"run", "freeze", "transfer", "explain", "tokenize"}


def test_plan_keys_runs_and_gates_agree_with_plan_and_ledger(study_dir, fields, context):
    study, results = read_recorded_study(study_dir), Ledger.read(study_dir).get_results()
    seeds = {spec.id: spec.seed for spec in context.specs}
    num_keys = num_run_ids = 0
    for field in fields.values():
        for key in field["source"]["plan_keys"]:
            section, name = key["key"].split(".")[:2]
            assert name in type(getattr(study.plan, section)).model_fields, key
            num_keys += 1
        for runs in field["source"]["runs"]:
            assert set(runs["ids"]) <= results.keys()
            assert runs["num_runs"] == len(set(runs["ids"]))
            assert runs["num_seeds"] == len({seeds[run_id] for run_id in runs["ids"]})
            num_run_ids += len(runs["ids"])
        for gate in field["strength"]["gates"]:
            assert gate["outcome"] == GATES[gate["name"]]
            assert gate["accepted"] == ("planted" if gate["outcome"] != "passed" else None)
    # Without this, the loops above would also pass for explanations that name nothing.
    assert num_keys > 100 and num_run_ids > 100


def find_test(context, hyperparameter, axis):
    """Return the transfer test of a hyperparameter over an axis, such as the width."""
    (test,) = context.select_tests(lambda *tested: tested == (hyperparameter, axis))
    return test


def find_base_optimum(test):
    """Return the fitted optimum of a test at the base."""
    return next(
        optimum for optimum in test.verdict.optima if optimum.size == test.verdict.base_size
    )


def test_learning_rate_has_the_fitted_optimum_or_the_best_trial_as_its_source(context):
    """The fitted optimum at the base is used if there is one, and else the search's best trial."""
    optimum = find_base_optimum(find_test(context, "learning_rate", "width"))
    # "valley" is the stored word for a fitted loss basin.
    for is_fitted, kind in ((True, "valley"), (False, "search")):
        records = build_records(change_report(context, transfer={"at_base_optimum": is_fitted}))
        source = records["groups.hidden.1.learning_rate"].source
        assert source.kind == kind
        assert (f"from {optimum.num_runs} runs" in source.text) == is_fitted


def test_value_of_the_best_trial_that_equals_a_fitted_optimum_comes_from_the_search(context):
    """Only a learning rate is moved to its fitted optimum."""
    value = context.find_value_row("clip_norm").base_value
    tests = []
    for test in context.tests:
        optima = [optimum.model_copy(update={"value": value}) for optimum in test.verdict.optima]
        is_changed = test.verdict.hyperparameter == "clip_norm"
        update = {"optima": optima} if is_changed else {}
        tests.append(dataclasses.replace(test, verdict=test.verdict.model_copy(update=update)))
    changed = change_report(
        dataclasses.replace(context, tests=tuple(tests)), transfer={"at_base_optimum": True}
    )
    assert build_records(changed)["clip_norm"].source.kind == "search"


def test_advice_names_only_the_plan_keys_that_decide_a_field(context):
    """The number of layers is target.num_layers, or else model.num_layers."""
    target = context.plan.target.model_copy(update={"num_layers": 1})
    for plan, has_model_key in (
        (context.plan, True),
        (context.plan.model_copy(update={"target": target}), False),
    ):
        (advice,) = build_records(dataclasses.replace(context, plan=plan))[
            "shape.num_layers"
        ].change
        assert "target.num_layers" in advice
        assert ("model.num_layers" in advice) == has_model_key


def test_learning_rate_of_a_group_names_its_rule_and_the_extrapolation(fields, context):
    field = fields["groups.hidden.1.learning_rate"]
    assert field["source"]["rules"][0].startswith("mup: ")
    assert "For hidden parameters: the base's value times m_N^-1" in field["source"]["text"]
    assert field["strength"]["outcome"] == context.report.transfer.together.outcome

    # The strength names how far the target is beyond the largest width, 16.
    strength = fields["transfer.learning_rate.width.power"]["strength"]
    assert strength["extrapolation"] == pytest.approx(fields["shape.width"]["value"] / 16)


def test_each_field_names_its_kind_of_source_and_strength(fields, context):
    kinds = {
        name: (field["source"]["kind"], field["strength"]["kind"]) for name, field in fields.items()
    }
    assert {
        "learning_rate.schedule.warmup_steps": ("search", "assumed"),
        "clip_norm": ("search", "measured"),
        "groups.readout.weight_decay": ("default", "assumed"),
        "groups.embedding.weight_decay": ("rule", "assumed"),
        "groups.readout.init_std": ("rule", "measured"),
        "forward.output": ("rule", "measured"),
        "shape.width": ("fit", "measured"),
        "shape.seq_len": ("plan", "assumed"),
        "shape.num_heads": ("derived", "exact"),
        "data.data_id": ("corpus", "exact"),
        "spikes.rollback_steps": ("fixed", "assumed"),
        "optimizer": ("fixed", "assumed"),
        "parallelism.tensor": ("default", "chosen"),
        "seed": ("default", "chosen"),
    }.items() <= kinds.items()
    assert f"trial {context.report.search.best_trial} " in fields["clip_norm"]["source"]["text"]
    # The forecast rests on the nine rungs of the ladder.
    forecast = fields["predicted.loss_nats"]["strength"]
    assert forecast["num_runs"] == 9
    assert forecast["extrapolation"] == fields["predicted.extrapolation"]["value"]


@pytest.mark.parametrize("outcome", ["holds", "drifts", "cannot_tell"])
def test_strength_has_the_outcome_of_the_verdict(context, outcome):
    rows = [{**row.to_json(), "outcome": outcome} for row in context.report.transfer.values]
    verdict = {"outcome": outcome, "reasons": ["planted doubt"]}
    tests = tuple(
        dataclasses.replace(test, verdict=test.verdict.model_copy(update=verdict))
        for test in context.tests
    )
    changed = change_report(dataclasses.replace(context, tests=tests), transfer={"values": rows})
    record = build_records(changed)["clip_norm"]
    assert record.strength.outcome == outcome
    assert ("planted doubt" in record.strength.text) == (outcome == "cannot_tell")
    assert any("--spend" in advice for advice in record.change) == (outcome == "cannot_tell")


def test_config_without_provenance_is_refused_as_tampered(config, tmp_path):
    folder = tmp_path / "frozen"
    shutil.copytree(config, folder)
    (folder / "attestations" / "provenance.json").unlink()
    code, body = run_json("explain", folder, "seed")
    assert (code, body["error"]) == (5, "TamperedError")
    assert run_json("verify", folder)[0] == 5


def test_provenance_of_an_older_version_is_refused_with_advice(config, tmp_path):
    """An older version of forerun recorded fewer fields."""
    folder = tmp_path / "frozen"
    shutil.copytree(config, folder)
    provenance = read_attestation(folder / "attestations" / "provenance.json", config.name)
    older = {**provenance, "fields": provenance["fields"][1:]}
    attest(folder, "provenance", config.name, older)
    code, body = run_json("explain", folder, "seed")
    assert (code, body["error"]) == (4, "NoProvenanceError")
    assert "`forerun freeze STUDY`" in body["message"] and "schema_version" in body["message"]
    assert run_json("verify", folder)[0] == 0


def test_verify_rejects_a_shortened_ledger(study_dir, config, tmp_path):
    """A shortened chain of records is valid by itself; the config's evidence contradicts it."""
    shutil.copytree(study_dir, tmp_path / "study")
    folder, ledger = tmp_path / "study" / "frozen" / config.name, tmp_path / "study" / "ledger.db"
    code, body = run_json("verify", folder)
    assert code == 0 and any("the study's ledger" in line for line in body["verified"])

    # Delete the records since the freeze.
    evidence = read_attestation(folder / "attestations" / "evidence.json", config.name)
    head = evidence["ledger_head"]
    with sqlite3.connect(ledger) as connection:
        ((frozen_at,),) = connection.execute("SELECT seq FROM records WHERE hash = ?", (head,))
        connection.execute("DELETE FROM records WHERE seq >= ?", (frozen_at,))
        connection.execute(
            "UPDATE head SET (seq, hash) = (SELECT seq, hash FROM records ORDER BY seq DESC LIMIT "
            "1)"
        )
    connection.close()
    assert run_json("status", tmp_path / "study")[0] in (0, 3, 4), "the shorter chain is sound"
    code, body = run_json("verify", folder)
    assert code == 5 and head[:12] in body["message"]


def test_edited_provenance_is_not_explained(config, tmp_path):
    shutil.copytree(config, tmp_path / config.name)
    path = tmp_path / config.name / "attestations" / "provenance.json"
    assert "planted" in path.read_text()
    path.write_text(path.read_text().replace("planted", "a better reason", 1))
    code, body = run_json("explain", tmp_path / config.name, "seed")
    assert (code, body["error"]) == (5, "TamperedError")


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("clip", ["clip_norm"]),
        ("warmup_fraction", ["learning_rate.schedule.warmup_steps"]),
        ("warmup", ["learning_rate.schedule.warmup_steps"]),
        ("width", ["shape.width", "base_shape.width", "parametrization.width"]),
        ("groups.embedding.lr", ["groups.embedding.learning_rate"]),
        ("groups.hidden.lr", ["groups.hidden.1.learning_rate", "groups.hidden.2.learning_rate"]),
        ("transfer.clip_norm.*.outcome", ["transfer.clip_norm.width.outcome"]),
    ],
)
def test_field_is_found_by_short_names(config, name, paths):
    assert [field.path for field in find_fields(list_fields(read_launch(config)), name)] == paths


def test_unknown_field_is_refused_with_a_suggestion(config):
    # No field is similar to an empty name.
    for name, suggestion in (
        ("shpae.width", "shape.width"),
        ("", "`forerun explain FROZEN` lists them"),
    ):
        code, body = run_json("explain", config, name)
        assert (code, body["error"]) == (2, "UnknownFieldError")
        assert suggestion in body["message"]


def test_explain_imports_no_heavy_package(config):
    script = (
        "import sys\nfrom forerun._launcher.cli.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print([name for name in ('torch', 'mup', 'ray', 'scipy', 'numpy') if name in "
        "sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "explain", str(config)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.strip() == "[]"


def test_every_possible_field_of_a_decision_has_an_origin():
    for key in list_leaf_fields():
        assert find_origin(key).kind
    for key in ("planted", "checkpointing.planted", "groups.planted"):
        with pytest.raises(KeyError):
            find_origin(key)


def test_closed_fit_gate_warns_before_the_values_that_need_the_fit(context):
    gate = {"name": "fit", "outcome": "cannot_tell", "reason": "at_bound: E"}
    records = build_records(change_report(context, gates=[gate]))
    records_without_gate = build_records(context)
    decision_fields = {field.path: field for field in list_fields(context.decision)}
    for name in ("predicted.loss_nats", "shape.width"):
        record, field = records[name], decision_fields[name]
        assert "at_bound: E" in record.warnings[0]
        assert format_field(field, record).startswith(record.warnings[0])
        assert format_field_table([(field, record)]).startswith(record.warnings[0])
        assert records_without_gate[name].warnings == ()


def test_searched_axis_has_the_search_as_its_source(context):
    records = build_records(context)
    assert records["forward.embedding"].source.kind == "rule"
    assert records["groups.readout.beta2"].source.kind == "default"

    # The same study with both as axes of the search.
    axes = {"beta2": (0.9, 0.99), "embedding_multiplier": (0.5, 2.0)}
    plan_search = context.plan.search.model_copy(update={"axes": axes})
    plan = context.plan.model_copy(update={"search": plan_search})
    search = copy.deepcopy(context.report.search.to_json())
    search["ranges"] |= {name: list(ends) for name, ends in axes.items()}
    search["best"] |= {"beta2": 0.95, "embedding_multiplier": 1.0}
    searched = change_report(dataclasses.replace(context, plan=plan), search=search)
    records = build_records(searched)
    source = records["groups.readout.beta2"].source
    assert source.kind == "search" and source.plan_keys[0].key == "search.axes.beta2"
    assert records["forward.embedding"].source.kind == "search"


@pytest.mark.parametrize("measured_power", [-0.25, -0.31])
def test_measured_rule_shows_both_powers_if_they_differ(context, measured_power):
    """The power to the target may differ from the power over the sizes that were run."""
    rules = tuple(
        dataclasses.replace(rule, power=-0.31, measured_power=measured_power)
        if rule.source == "measured"
        else rule
        for rule in context.decision.transfer
    )
    decision = dataclasses.replace(context.decision, transfer=rules)
    records = build_records(dataclasses.replace(context, decision=decision))
    text = records["transfer.learning_rate.duration.power"].source.text
    phrase = "-0.31 from base to target, -0.25 over the sizes that were run"
    assert (phrase in text) == (measured_power == -0.25)
    assert ("from base to target" in text) == (measured_power == -0.25)


def test_bend_is_shown_for_a_measured_power_only(context):
    """A bend is a change of the slope at which the optimum moves with the duration."""
    test = find_test(context, "learning_rate", "duration")
    octaves = Estimate(value=0.1, interval=(-0.2, 0.4))
    bend = Bend(probability=0.62, octaves_per_doubling=octaves)
    phrase = (
        "With probability 0.62 the line through the optima bends: beyond the largest size that was "
        "run, the optimum moves by +0.10 [-0.20, +0.40] octaves per doubling more than up to there"
    )
    for is_measured in (True, False):
        changes = {"bend": bend, "power_is_measured": is_measured}
        changed = dataclasses.replace(test, verdict=test.verdict.model_copy(update=changes))
        assert (phrase in changed.describe()) == is_measured
