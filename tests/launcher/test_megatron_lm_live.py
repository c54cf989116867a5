"""The Megatron-LM export in the hands of Megatron: parser and checks, groups, scheduler, checkpoint
loader, logits.

Needs an interpreter with megatron-core (`make trainers TRAINERS=megatron-lm`).
"""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_lm_case import MEGATRON_MUP, decision_for, spec_for, with_hidden_eps
from trainer_venv import in_trainer, interpreter

from launcher.exporters import proof
from launcher.exporters.trainers import megatron_lm
from launcher.exporters.trainers.megatron_lm_numbers import flags_of, scheduler_of
from launcher.exporters.view import TOLD, compare, marked
from launcher.frozen.frozen import Parallelism, assign_groups
from launcher.trainer.assembly import build_optimizer
from proxies.core.rules import named
from proxies.core.schedule import Schedule, lr_table
from proxies.model.decoder import Decoder, Multipliers
from proxies.model.loss import token_loss
from proxies.parametrization.parametrization import initial_tensor, parameter_table

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

# What CPUs lack is told to Megatron by flags; what it asks of CUDA all the same, here.
LOADED = """
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
told = open("arguments.txt").read().split()
plain = ("--use-cpu-initialization --transformer-impl local --no-rope-fusion --no-persist-layer-norm "
         "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --load nothing --pretrained-checkpoint")
sys.argv = ["pretrain_gpt.py", *told, *plain.split(), seed]
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
live = torch.optim.AdamW(_get_param_groups([model], settings, overrides), lr=settings.lr, eps=settings.adam_eps,
                         betas=(settings.adam_beta1, settings.adam_beta2), weight_decay=settings.weight_decay)
scheduler = training.get_optimizer_param_scheduler(live)
losses = []
for batch in ids:
    loss = model(batch[:, :-1], positions, mask, labels=batch[:, 1:]).mean()
    live.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
    live.step()
    scheduler.step(increment=args.global_batch_size)
    losses.append([loss.item(), norm.item()])
np.savez(found_file, logits=logits.numpy(), losses=np.array(losses), **weights)
sys.stdout.flush()
os._exit(0)
"""  # noqa: E501


@pytest.fixture
def trainer_python() -> Path:
    return interpreter("megatron-lm")


def said_by(report, decision, view, names):
    """What Megatron's view differs in, as fields of the decision."""
    fields = set()
    for problem in compare(decision, view, names):
        told = problem.partition(": ")[2]
        fields.add(
            "learning_rate.table_sha256" if "rate at step" in told else "groups." + told.split()[0]
        )
    return fields


@pytest.mark.slow
def test_megatron_makes_the_frozen_run_of_what_use_mup_and_plain_flags_can_say(
    tmp_path, manifest, trainer_python
):
    mup = spec_for(manifest.data_id, parametrization=MEGATRON_MUP, schedule=WSD)
    of_mup = with_hidden_eps(decision_for(manifest, mup, parallelism=EVERY_DEGREE), 2)
    standard = named("sp", decayed="two_dimensional")
    warm = Schedule(kind="wsd", num_steps=12, warmup_steps=4, decay_steps=5)
    of_sp = decision_for(
        manifest,
        spec_for(manifest.data_id, parametrization=standard, schedule=warm),
        clip_norm=None,
    )
    for name, decision in {"mup": of_mup, "sp": of_sp}.items():
        report = megatron_lm.export(decision, tmp_path / name)
        assert report.lost == ()
        view = proof.ask("megatron-lm", trainer_python, tmp_path / name)
        assert view.version in megatron_lm.VERSIONS
        assert compare(decision, view, megatron_lm.parameter_names(decision.shape)) == []
        print(f"{name}: {len(view.parameters)} parameters, {len(view.steps)} steps equal")

    arguments = (tmp_path / "mup" / "arguments.txt").read_text()
    planted = arguments.replace("--mup-base-hidden-size 32", "--mup-base-hidden-size 16")
    planted = planted.replace("--mup-embedding-mult 2.0", "--mup-embedding-mult 2.001")
    # Megatron takes it for 1 / m
    planted = planted.replace("--mup-output-mult 0.75", "--mup-output-mult 1.0")
    assert planted != arguments
    (tmp_path / "mup" / "arguments.txt").write_text(planted)
    view = proof.ask("megatron-lm", trainer_python, tmp_path / "mup")
    problems = compare(of_mup, view, megatron_lm.parameter_names(of_mup.shape))
    for said in (
        "decoder.layers.0.mlp.linear_fc2.weight: learning_rate is 0.0078125, frozen as 0.015625",
        "forward.embedding is 2.001, frozen as 2.0",
        "forward.output is 0.25, frozen as 0.75",
    ):
        assert said in problems


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "parametrization", "of_shape"),
    [
        (COSINE, "mup", {}),
        (LINEAR, "umup_like", {"tied": True, "qk_norm": True}),
    ],
)
def test_what_is_lost_is_what_megatron_does_otherwise_and_by_as_much(
    tmp_path, manifest, trainer_python, schedule, parametrization, of_shape
):
    rules = (
        named("mup_no_wd_scaling", embedding_rate="inverse_root")
        if "like" in parametrization
        else named("mup")
    )
    spec = spec_for(manifest.data_id, of_shape=of_shape, parametrization=rules, schedule=schedule)
    decision = decision_for(manifest, spec)
    report = megatron_lm.export(decision, tmp_path)
    names = megatron_lm.parameter_names(decision.shape)
    view = proof.ask("megatron-lm", trainer_python, tmp_path)
    lost = {entry.field for entry in report.lost}
    found = said_by(report, decision, view, names)
    assert found == lost - {"learning_rate.step_convention", "learning_rate.samples"}
    told = marked(decision, view, names, megatron_lm.foretold(decision))
    assert told == [f"{problem}{TOLD}" for problem in compare(decision, view, names)]
    assert "groups.weight_decay" in lost
    notes = " ".join(entry.note for entry in report.lost)
    for name, group in assign_groups(decision.groups, list(names)).items():
        theirs = view.parameters[names[name]]
        for field in ("learning_rate", "weight_decay", "eps"):
            ours, live = getattr(group, field), getattr(theirs, field)
            if not math.isclose(ours, live, rel_tol=1e-12):
                assert f"{group.kind}: frozen {ours:.6g}, Megatron {live:.6g}" in notes
    scheduler, off = scheduler_of(decision, flags_of(decision))
    shares = [scheduler.share(step) for step in range(schedule.num_steps)]
    for held in view.parameters.values():
        wanted = [held.learning_rate * share for share in shares]
        assert view.rates[held.rates] == pytest.approx(wanted, rel=1e-12)
    print(
        f"{parametrization}: {sorted(lost)}, lr(t) at most {off:.3f} of the peak away, first "
        f"{shares[0]}"
    )


def our_run(decision, spec, ids):
    """Losses and gradient norms of the embedded trainer's model and optimizer, and its logits of
    the first batch.
    """
    model, forward = Decoder(spec.shape), decision.forward
    for numbers in parameter_table(spec):
        model.get_parameter(numbers.name).data = initial_tensor(numbers, spec.seed)
    multipliers = Multipliers(**dataclasses.asdict(forward))
    optimizer = build_optimizer(model, decision.groups, decision.optimizer)
    peaks = [group["lr"] for group in optimizer.param_groups]
    with torch.no_grad():
        logits = model(ids[0, :, :-1], multipliers).numpy()
    weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    rows = []
    for batch, share in zip(ids, lr_table(decision.learning_rate.schedule), strict=True):
        loss = token_loss(model(batch[:, :-1], multipliers), batch[:, 1:])
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
    ("of_shape", "residual"),
    [({}, 1.0), ({"tied": True, "qk_norm": True, "num_kv_heads": 4}, 1.0), ({}, 0.4)],
)
def test_megatrons_model_starts_from_the_seed_checkpoint_and_takes_our_steps(
    tmp_path, manifest, trainer_python, of_shape, residual
):
    spec = spec_for(manifest.data_id, of_shape=of_shape, parametrization=MEGATRON_MUP, schedule=WSD)
    decision = with_hidden_eps(decision_for(manifest, spec), 2)
    decision = dataclasses.replace(
        decision, forward=dataclasses.replace(decision.forward, residual=residual)
    )
    assert megatron_lm.export(decision, tmp_path).lost == ()
    view = proof.ask("megatron-lm", trainer_python, tmp_path)
    assert compare(decision, view, megatron_lm.parameter_names(decision.shape)) == []
    ids = np.random.default_rng(0).integers(0, 256, (12, 8, spec.shape.seq_len + 1)) // 8
    np.save(tmp_path / "ids.npy", ids)
    for command in (
        ["seed_checkpoint.py", "run/seed"],
        ["-c", LOADED, "run/seed", "ids.npy", "found.npz"],
    ):
        done = in_trainer([trainer_python, *command], tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    found = np.load(tmp_path / "found.npz")
    names = megatron_lm.parameter_names(spec.shape)
    weights, logits, rows = our_run(decision, spec, torch.from_numpy(ids))
    assert set(found.files) == {"logits", "losses", *names.values()}
    for name in (
        "tok_embeddings.weight",
        "layers.1.feed_forward.w2.weight",
        "layers.0.attention.wo.weight",
    ):
        assert np.array_equal(found[names[name]], weights[name])
    difference = np.abs(logits.reshape(found["logits"].shape) - found["logits"]).max()
    apart = np.abs(found["losses"] - rows).max(axis=0)
    print(
        f"{of_shape}: logits within {difference:.1e}, 12 losses within {apart[0]:.1e}, norms "
        f"within {apart[1]:.1e}"
    )
    print(
        f"  losses {rows[0, 0]:.3f} to {rows[-1, 0]:.3f}, norms {rows[:, 1].min():.2f} to "
        f"{rows[:, 1].max():.2f}"
    )
    assert difference < 1e-5
    assert apart.max() < 1e-4
