"""Tests of the Megatron-LM export in Megatron itself: parser and checks, groups, scheduler,
checkpoint loader, logits.

The tests need an interpreter with megatron-core (`make trainers TRAINERS=megatron-lm`).
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_lm_case import (
    MEGATRON_MUP,
    make_megatron_decision,
    make_megatron_spec,
    scale_hidden_eps,
)
from trainer_venv import require_interpreter, run_in_trainer

from forerun._launcher.main_run.exporters import proof
from forerun._launcher.main_run.exporters.comparison import (
    PREDICTED_MARK,
    compare,
    compare_with_prediction,
)
from forerun._launcher.main_run.exporters.trainers import megatron_lm
from forerun._launcher.main_run.exporters.trainers.megatron_lm_numbers import (
    choose_flags,
    choose_scheduler,
)
from forerun._launcher.main_run.frozen.frozen import Parallelism, assign_groups
from forerun._launcher.main_run.trainer.model_builder import build_optimizer
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule, compute_lr_table
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.model.loss import compute_token_loss
from forerun._proxies.parametrization.parametrization import (
    compute_parameter_table,
    draw_initial_tensor,
)

WSD = Schedule(kind="wsd", num_steps=12, decay_steps=5, final_fraction=0.1)
COSINE = Schedule(kind="cosine", num_steps=12, warmup_steps=3, final_fraction=0.1)
LINEAR = Schedule(kind="linear", num_steps=12, warmup_steps=4, final_fraction=0.2)
EVERY_DEGREE = Parallelism(
    data_parallel_shard=2,
    data_parallel_replicate=2,
    tensor=2,
    pipeline=2,
    context=2,
    microbatch_sequences=1,
    activation_checkpointing="full",
)

# This program loads an export in Megatron, saves its initial weights and logits, and trains it. It
# runs on CPUs: flags turn off what needs a GPU, and the remaining calls of CUDA are replaced.
TRAIN_ON_CPU = """
import contextlib, importlib, importlib.metadata, os, sys, types
sys.path.insert(0, os.getcwd())
os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "RANK": "0", "WORLD_SIZE": "1"}
import numpy as np, torch
from torch import distributed
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core.optimizer import _get_param_groups, get_mup_config_overrides
from megatron.training import arguments, checkpointing, global_vars, training
seed, ids_file, found_file = sys.argv[1:]
exported_flags = open("arguments.txt").read().split()
cpu_flags = ("--use-cpu-initialization --transformer-impl local --no-rope-fusion --no-persist-layer-norm "
             "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --load nothing --pretrained-checkpoint")
sys.argv = ["pretrain_gpt.py", *exported_flags, *cpu_flags.split(), seed]
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *device: None
tensor_parallel.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)
checkpointing.read_metadata = lambda tracker: (0, open(tracker).read() == "release")
args = arguments.parse_args()
arguments.validate_args(args)
global_vars.set_args(args)
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = arguments.core_transformer_config_from_args(args)
spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
if args.spec:
    spec = getattr(importlib.import_module(args.spec[0]), args.spec[1])
model = GPTModel(
    config=config, transformer_layer_spec=spec,
    vocab_size=args.vocab_size, max_sequence_length=args.max_position_embeddings, parallel_output=False,
    share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base,
)
assert checkpointing.load_checkpoint([model], None, None)[0] == 0
weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
ids = torch.from_numpy(np.load(ids_file))
positions = torch.arange(args.seq_length)[None]
mask = torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool).triu(1)
with torch.no_grad():
    logits = model(ids[0, :, :-1], positions, mask)
microbatches.init_num_microbatches_calculator(0, None, args.global_batch_size, args.micro_batch_size, 1, False)
settings, overrides = training.get_megatron_optimizer_config(args)
overrides |= get_mup_config_overrides(settings, config.mup_width_mult, settings.optimizer)
optimizer = torch.optim.AdamW(_get_param_groups([model], settings, overrides), lr=settings.lr, eps=settings.adam_eps,
                              betas=(settings.adam_beta1, settings.adam_beta2), weight_decay=settings.weight_decay)
scheduler = training.get_optimizer_param_scheduler(optimizer)
losses = []
for batch in ids:
    loss = model(batch[:, :-1], positions, mask, labels=batch[:, 1:]).mean()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
    optimizer.step()
    scheduler.step(increment=args.global_batch_size)
    losses.append([loss.item(), norm.item()])
np.savez(found_file, logits=logits.numpy(), losses=np.array(losses), **weights)
sys.stdout.flush()
os._exit(0)
"""  # noqa: E501


@pytest.fixture
def trainer_python() -> Path:
    """Interpreter that has Megatron; the test is skipped without it."""
    return require_interpreter("megatron-lm")


def list_differing_fields(decision, view, names):
    """Return the fields of the fidelity report that Megatron's view contradicts.

    A view holds the numbers with which Megatron would train.
    """
    fields = set()
    for problem in compare(decision, view, names):
        text = problem.partition(": ")[2]
        if "rate at step" in text:
            fields.add("learning_rate.table_sha256")
        else:
            fields.add("groups." + text.split()[0])
    return fields


@pytest.mark.slow
def test_megatron_has_the_frozen_numbers_of_decisions_without_lost_fields(
    tmp_path, manifest, trainer_python
):
    mup = make_megatron_spec(manifest.data_id, parametrization=MEGATRON_MUP, schedule=WSD)
    mup_decision = scale_hidden_eps(
        make_megatron_decision(manifest, mup, parallelism=EVERY_DEGREE), 2
    )
    standard = get_parametrization("sp", decayed="two_dimensional")
    warm = Schedule(kind="wsd", num_steps=12, warmup_steps=4, decay_steps=5)
    standard_decision = make_megatron_decision(
        manifest,
        make_megatron_spec(manifest.data_id, parametrization=standard, schedule=warm),
        clip_norm=None,
    )
    for name, decision in {"mup": mup_decision, "sp": standard_decision}.items():
        report = megatron_lm.export(decision, tmp_path / name)
        assert report.lost == ()
        view = proof.ask_trainer("megatron-lm", trainer_python, tmp_path / name)
        assert view.version in megatron_lm.VERSIONS
        assert compare(decision, view, megatron_lm.parameter_names(decision.shape)) == []

    arguments = (tmp_path / "mup" / "arguments.txt").read_text()
    planted = arguments.replace("--mup-base-hidden-size 32", "--mup-base-hidden-size 16")
    planted = planted.replace("--mup-embedding-mult 2.0", "--mup-embedding-mult 2.001")
    # Megatron takes the multiplier 1.0 as unset, and uses 1 over the width multiplier: 0.25.
    planted = planted.replace("--mup-output-mult 0.75", "--mup-output-mult 1.0")
    assert planted != arguments
    (tmp_path / "mup" / "arguments.txt").write_text(planted)
    view = proof.ask_trainer("megatron-lm", trainer_python, tmp_path / "mup")
    problems = compare(mup_decision, view, megatron_lm.parameter_names(mup_decision.shape))
    for problem in (
        "decoder.layers.0.mlp.linear_fc2.weight: learning_rate is 0.0078125, frozen as 0.015625",
        "forward.embedding is 2.001, frozen as 2.0",
        "forward.output is 0.25, frozen as 0.75",
    ):
        assert problem in problems


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "rules", "shape_changes"),
    [
        (COSINE, get_parametrization("mup"), {}),
        (
            LINEAR,
            get_parametrization("mup_no_wd_scaling", embedding_rate="inverse_root"),
            {"tied": True, "qk_norm": True},
        ),
    ],
    ids=["muP", "like u-muP, tied, qk_norm"],
)
def test_lost_fields_are_those_in_which_megatron_differs(
    tmp_path, manifest, trainer_python, schedule, rules, shape_changes
):
    spec = make_megatron_spec(
        manifest.data_id, shape_changes=shape_changes, parametrization=rules, schedule=schedule
    )
    decision = make_megatron_decision(manifest, spec)
    report = megatron_lm.export(decision, tmp_path)
    names = megatron_lm.parameter_names(decision.shape)
    view = proof.ask_trainer("megatron-lm", trainer_python, tmp_path)
    lost = {entry.field for entry in report.lost}
    differing = list_differing_fields(decision, view, names)
    assert differing == lost - {"learning_rate.step_convention", "learning_rate.samples"}
    problems = compare_with_prediction(decision, view, names, megatron_lm.predict_run(decision))
    assert problems == [f"{problem}{PREDICTED_MARK}" for problem in compare(decision, view, names)]
    assert "groups.weight_decay" in lost
    notes = " ".join(entry.note for entry in report.lost)
    for name, group in assign_groups(decision.groups, list(names)).items():
        parameter = view.parameters[names[name]]
        for field in ("learning_rate", "weight_decay", "eps"):
            frozen_value, live = getattr(group, field), getattr(parameter, field)
            if not math.isclose(frozen_value, live, rel_tol=1e-12):
                assert f"{group.kind}: frozen {frozen_value:.6g}, Megatron {live:.6g}" in notes
    scheduler, _ = choose_scheduler(decision, choose_flags(decision))
    shares = [scheduler.compute_share(step) for step in range(schedule.num_steps)]
    for parameter in view.parameters.values():
        expected = [parameter.learning_rate * share for share in shares]
        assert view.rates[parameter.rates] == pytest.approx(expected, rel=1e-12)


def train_embedded(decision, spec, ids):
    """Train a run as the embedded trainer does.

    Returns:
        The initial weights by name, the logits of the first batch, and the loss and gradient norm
        of each step.
    """
    model, forward = Decoder(spec.shape), decision.forward
    for numbers in compute_parameter_table(spec):
        model.get_parameter(numbers.name).data = draw_initial_tensor(numbers, spec.seed)
    multipliers = Multipliers(**dataclasses.asdict(forward))
    optimizer = build_optimizer(model, decision)
    peaks = [group["lr"] for group in optimizer.param_groups]
    with torch.no_grad():
        logits = model(ids[0, :, :-1], multipliers).numpy()
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    rows = []
    for batch, share in zip(ids, compute_lr_table(decision.learning_rate.schedule), strict=True):
        loss = compute_token_loss(model(batch[:, :-1], multipliers), batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), decision.clip_norm)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * share
        optimizer.step()
        rows.append([loss.item(), norm.item()])
    return weights, logits, np.array(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape_changes", "residual"),
    [({}, 1.0), ({"tied": True, "qk_norm": True, "num_kv_heads": 4}, 1.0), ({}, 0.4)],
)
def test_megatron_starts_from_the_seed_checkpoint_and_trains_like_the_embedded_trainer(
    tmp_path, manifest, trainer_python, shape_changes, residual
):
    spec = make_megatron_spec(
        manifest.data_id, shape_changes=shape_changes, parametrization=MEGATRON_MUP, schedule=WSD
    )
    decision = scale_hidden_eps(make_megatron_decision(manifest, spec), 2)
    decision = dataclasses.replace(
        decision, forward=dataclasses.replace(decision.forward, residual=residual)
    )
    assert megatron_lm.export(decision, tmp_path).lost == ()
    view = proof.ask_trainer("megatron-lm", trainer_python, tmp_path)
    assert compare(decision, view, megatron_lm.parameter_names(decision.shape)) == []
    # Twelve batches of 32 different tokens, so that there is something to learn
    ids = np.random.default_rng(0).integers(0, 256, (12, 8, spec.shape.seq_len + 1)) // 8
    np.save(tmp_path / "ids.npy", ids)
    for command in (
        ["seed_checkpoint.py", "run/seed"],
        ["-c", TRAIN_ON_CPU, "run/seed", "ids.npy", "found.npz"],
    ):
        process = run_in_trainer([trainer_python, *command], tmp_path)
        assert process.returncode == 0, process.stderr[-3000:]
    arrays = np.load(tmp_path / "found.npz")
    names = megatron_lm.parameter_names(spec.shape)
    weights, logits, rows = train_embedded(decision, spec, torch.from_numpy(ids))
    assert set(arrays.files) == {"logits", "losses", *names.values()}
    for name in (
        "tok_embeddings.weight",
        "layers.1.feed_forward.w2.weight",
        "layers.0.attention.wo.weight",
    ):
        assert np.array_equal(arrays[names[name]], weights[name])
    difference = np.abs(logits.reshape(arrays["logits"].shape) - arrays["logits"]).max()
    differences = np.abs(arrays["losses"] - rows).max(axis=0)
    assert difference < 1e-5
    assert differences.max() < 1e-4
