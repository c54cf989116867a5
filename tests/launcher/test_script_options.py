"""`forerun init --from train.py`: options of four kinds of scripts become a plan that loads;
nothing of them is run.
"""

import json
import re

import pytest
from tiny_study import ask

from launcher.plan.file import load_plan

ARGPARSE = """
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("--max-lr", type=float, default=6e-4)
parser.add_argument("--muon-lr", type=float, default=0.02)
parser.add_argument("--d-model", type=int); parser.add_argument("--max-iters", type=int)
parser.add_argument("--seed", type=int); parser.add_argument("--n-layer", type=int, default=3)
parser.add_argument("--out-dir"); parser.add_argument("--compile", action="store_true")
raise SystemExit("it was run")
print(json.dumps({"step": 1, "loss": 2.0})); print(json.dumps({"val/loss": 2.0}))
"""
DATACLASS = """
from dataclasses import dataclass
import wandb, tyro
@dataclass
class Args:
    learning_rate: float = 1e-3
    hidden_size: int = 256
    max_steps: int = 1000
    seed: int = 0
    warmup_steps: int = 10
wandb.init(); wandb.log({"train/loss": 1.0, "eval/loss": 1.0})
"""
HYDRA = """
import hydra
@hydra.main(config_path="conf")
def main(cfg):
    train(cfg.optim.lr, cfg.model.width, cfg.trainer.max_steps, cfg.seed)
"""
GLOBALS = """
learning_rate = 6e-4
n_embd = 768
max_iters = 600
seed = 1337
block_size = 128
exec(open("configurator.py").read())
"""


NANO = """
eval_interval = 250
eval_iters = 20
wandb_log = False
gradient_accumulation_steps = 5 * 8
batch_size = 12
n_embd = 384
n_layer = 6
learning_rate = 1e-3
max_iters = 5000
decay_lr = True
lr_scheduler_type = "cosine"
lr_decay_iters = 5000
muon_lr = 0.02
seed = 1
best_val_loss = 1e9
exec(open("configurator.py").read())
saved = {"model": model, "best_val_loss": best_val_loss}
wandb.init(); wandb.log({"iter": 0, "train/loss": 1.0, "val/loss": 1.0, "lr": 0.1})
"""
"""The style of scripts whose every constant is an option."""


def planned(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    code, body = ask("init", "--from", tmp_path / "train.py", "--out", tmp_path / "plan.toml")
    assert code == 0, body
    return load_plan(tmp_path / "plan.toml")


def test_argparse(tmp_path):
    plan = planned(tmp_path, ARGPARSE)
    assert plan.proxy.command.split()[2:] == [
        "--max-lr",
        "{lr}",
        "--d-model",
        "{width}",
        "--max-iters",
        "{num_steps}",
        "--seed",
        "{seed}",
        "--n-layer",
        "{num_layers}",
        "--out-dir",
        "{run_dir}",
        "--muon-lr",
        "{muon_lr}",
    ]
    assert list(plan.search.own) == ["muon_lr"] and plan.model.num_layers == 3
    assert (plan.proxy.metrics_train_loss_key, plan.proxy.metrics_validation_loss_key) == (
        "loss",
        "val/loss",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            DATACLASS,
            ["--learning_rate {lr}", "--hidden_size {width}", "--warmup_steps {warmup_steps}"],
        ),
        (
            HYDRA,
            [
                "optim.lr={lr}",
                "model.width={width}",
                "trainer.max_steps={num_steps}",
                "seed={seed}",
            ],
        ),
        (GLOBALS, ["--learning_rate={lr}", "--n_embd={width}", "--block_size={seq_len}"]),
    ],
    ids=["dataclass", "hydra", "globals"],
)
def test_other_kinds_of_options(text, words, tmp_path):
    plan = planned(tmp_path, text)
    assert all(word in plan.proxy.command for word in words)
    assert plan.proxy.metrics_format == ("wandb" if "wandb" in text else "jsonl")


def test_all_that_is_missing_is_named_at_once(tmp_path):
    (tmp_path / "train.py").write_text(
        ARGPARSE.replace('"--seed"', '"--entropy"').replace('"--d-model"', '"--size"')
    )
    code, body = ask("init", "--from", tmp_path / "train.py", "--out", tmp_path / "plan.toml")
    assert (
        code == 2
        and "{width}" in json.dumps(body["problems"])
        and "{seed}" in json.dumps(body["problems"])
    )
    assert not (tmp_path / "plan.toml").exists()
    assert ask("init", "--from", tmp_path / "none.py", "--out", tmp_path / "plan.toml")[0] == 2


def test_only_floats_are_rates_and_a_step_is_the_planned_one(tmp_path):
    plan = planned(tmp_path, NANO)
    command = plan.proxy.command.split()
    assert list(plan.search.own) == ["muon_lr"], (
        "no boolean, text, or number of steps is a learning rate"
    )
    assert {
        "--lr_decay_iters={num_steps}",
        "--eval_interval={num_steps}",
        "--wandb_log=True",
    } <= set(command)
    assert {"--gradient_accumulation_steps=1", "--batch_size={batch_sequences}"} <= set(command)
    assert not any(
        word.startswith(("--decay_lr", "--lr_scheduler_type", "--eval_iters")) for word in command
    )
    proxy = plan.proxy
    keys = (proxy.metrics_step_key, proxy.metrics_train_loss_key, proxy.metrics_validation_loss_key)
    assert keys == ("iter", "train/loss", "val/loss")
    code, body = ask("validate", tmp_path / "plan.toml")
    assert code == 2 and [problem.partition(" ")[0] for problem in body["problems"]] == [
        "data.external"
    ]
    assert "data.vocab_size = 50304 is a guess" in body["problems"][0]
    assert ask("validate", tmp_path / "plan.toml", "--set", "data.external='my data'")[0] == 0


def test_a_vocabulary_that_the_script_names_is_known(tmp_path):
    plan = planned(tmp_path, NANO.replace("n_layer = 6", "n_layer = 6\nvocab_size = 4096"))
    assert plan.data.vocab_size == 4096 and "TODO" not in plan.data.external


@pytest.mark.parametrize(
    "name", ["min_lr", "learning_rate_min", "end_learning_rate", "warmup_init_lr"]
)
@pytest.mark.parametrize(
    "text", [NANO, ARGPARSE, DATACLASS, HYDRA], ids=["globals", "argparse", "dataclass", "hydra"]
)
def test_the_ends_of_a_schedule_follow_the_rate(tmp_path, text, name):
    """A fixed floor would be above a searched rate: it is 0, and no axis."""
    text = text.replace("best_val_loss = 1e9", f"{name} = 6e-5")
    text = text.replace(
        'parser.add_argument("--out-dir")',
        f'parser.add_argument("--{name}", type=float, default=6e-5)',
    )
    text = text.replace("    warmup_steps: int", f"    {name}: float = 6e-5\n    warmup_steps: int")
    text = text.replace("train(cfg.optim.lr", f"train(cfg.optim.{name}, cfg.optim.lr")
    plan = planned(tmp_path, text)
    assert name not in plan.search.own and re.search(rf"\b{name}[= ]0\.0", plan.proxy.command)


@pytest.mark.parametrize(
    "name", ["lr_decay", "min_lr_ratio", "layer_lr_mult", "lr_warmup_frac", "lr_gamma"]
)
def test_a_share_of_the_rate_is_no_rate(tmp_path, name):
    plan = planned(tmp_path, NANO.replace("n_layer = 6", f"n_layer = 6\n{name} = 0.1"))
    assert list(plan.search.own) == ["muon_lr"] and f"--{name}=" not in plan.proxy.command


def test_what_is_not_understood_is_to_do_and_refused(tmp_path):
    """Two validation losses: nothing says which one is meant."""
    text = NANO.replace('"val/loss": 1.0', '"val/loss": 1.0, "test/loss": 1.0')
    plan = planned(tmp_path, text)
    assert plan.proxy.metrics_validation_loss_key.startswith("TODO")
    for verb in (("validate",), ("sweep", "--study", tmp_path / "study")):
        code, body = ask(verb[0], tmp_path / "plan.toml", *verb[1:])
        assert (code, body["error"]) == (2, "PlanError")
        assert any(
            problem.startswith("proxy.metrics_validation_loss_key has a TODO")
            for problem in body["problems"]
        )
    assert not (tmp_path / "study").exists()
