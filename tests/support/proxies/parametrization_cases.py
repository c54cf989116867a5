"""Cases for tests of the parametrizations: shapes, runs, and checks against mup and theory.

The `check_` functions assert that a parametrization agrees with mup's package, with CompleteP, or
with the exponents that theory predicts for one optimizer step.
"""

import dataclasses
import math

import mup
import numpy as np
import pytest
import torch
from mup_reference import build_mup_model
from proxy_cases import BASE
from scipy import stats

from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.model.loss import compute_token_loss
from forerun._proxies.model.optimizer import build_torch_optimizer
from forerun._proxies.parametrization.parametrization import (
    compute_forward_numbers,
    compute_parameter_table,
    draw_initial_tensor,
    get_kind,
)

NUM_STEPS = 36
"""Steps of a run, a multiple of the duration ratios of the tests."""
HPARAMS = Hparams(learning_rate=0.01, weight_decay=0.1, beta1=0.85, eps=1e-9, output_multiplier=3.0)
FAMILIES = {
    "llama": BASE,
    "llama with QK-norm": dataclasses.replace(BASE, qk_norm=True),
    "gpt2": dataclasses.replace(BASE, family="gpt2"),
    "gpt2 with QK-norm": dataclasses.replace(BASE, family="gpt2", qk_norm=True),
}


def grow(base, *, heads=1, head_dim=1, ffn=1):
    """Return a wider shape than the base.

    Args:
        heads: Factor on the number of heads.
        head_dim: Factor on the head dim.
        ffn: Factor on the ratio of FFN width to width.
    """
    return dataclasses.replace(
        base,
        width=base.width * heads * head_dim,
        num_heads=base.num_heads * heads,
        num_kv_heads=base.num_kv_heads * heads,
        ffn_width=base.ffn_width * heads * head_dim * ffn,
    )


def make_spec(
    shape,
    base=BASE,
    parametrization="mup",
    hparams=HPARAMS,
    *,
    batch_ratio=1,
    duration_ratio=1,
    **changes,
):
    """Return the spec of a run.

    Args:
        batch_ratio: Batch size relative to the base run.
        duration_ratio: Number of tokens relative to the base run.
        changes: Options of the parametrization.
    """
    rules = (
        get_parametrization(parametrization, **changes)
        if isinstance(parametrization, str)
        else parametrization
    )
    batch = 4 * shape.seq_len * batch_ratio
    base_tokens = {
        "base_batch_tokens": 4 * shape.seq_len,
        "base_num_tokens": NUM_STEPS * batch // duration_ratio,
    }
    return RunSpec(
        optimizer="adamw",
        shape=shape,
        base_shape=base,
        parametrization=rules,
        hparams=hparams,
        batch_tokens=batch,
        data_id="none",
        schedule=Schedule(kind="constant", num_steps=NUM_STEPS),
        numerics=Numerics(),
        seed=0,
        **(base_tokens if rules.needs_tokens else {}),
    )


def compute_table(*args, **options):
    """Return the rows of a run's parameter table by parameter name."""
    rows = compute_parameter_table(make_spec(*args, **options))
    return {row.name: row for row in rows}


class TrainedDecoder:
    """A decoder in float64 with its numbers and an AdamW of one group per parameter."""

    def __init__(self, shape, rows, forward, seed=0):
        self.decoder, self.rows = Decoder(shape).double(), rows
        self.multipliers = Multipliers(**dataclasses.asdict(forward))
        parameters = dict(self.decoder.named_parameters())
        with torch.no_grad():
            for numbers in rows:
                parameters[numbers.name].copy_(self.draw_initial(numbers, seed))
        self.optimizer = build_torch_optimizer(
            "adamw", [(numbers, [parameters[numbers.name]]) for numbers in rows]
        )

    @staticmethod
    def draw_initial(numbers, seed):
        """Draw an initial tensor in float64, so that its std scales exactly."""
        if not numbers.init_std:
            return draw_initial_tensor(numbers, seed).double()
        unit_numbers = dataclasses.replace(numbers, init_std=1.0)
        return draw_initial_tensor(unit_numbers, seed).double() * numbers.init_std

    @classmethod
    def from_spec(cls, spec, seed=0):
        """Build the decoder of a run."""
        return cls(spec.shape, compute_parameter_table(spec), compute_forward_numbers(spec), seed)

    def compute_logits(self, ids_BT):
        """Return the logits of all positions."""
        return self.decoder(ids_BT, self.multipliers)

    def step(self, ids_BT, clip_norm=None):
        """Update once on the next-token loss; return the gradient's norm."""
        self.optimizer.zero_grad()
        compute_token_loss(self.compute_logits(ids_BT), ids_BT.roll(-1, -1)).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), clip_norm or math.inf)
        self.optimizer.step()
        return norm.item()


def draw_token_ids(shape, seed=0, num_sequences=3):
    """Draw token ids of shape [num_sequences, seq_len]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab_size, (num_sequences, shape.seq_len), generator=generator)


def check_matches_mup(shape, base):
    """Assert that rates, decays, stds and multipliers are those of mup's package.

    Each tensor is compared on a model that the package set up.
    """
    delta = grow(base, heads=2, head_dim=2 if shape.head_dim != base.head_dim else 1)
    model = build_mup_model(shape, base, output_mult=HPARAMS.output_multiplier, delta_shape=delta)
    named_parameters = dict(model.named_parameters())
    rows, base_rows = compute_table(shape, base), compute_table(base, base)
    decayed_rows = compute_table(shape, base, decayed="all")

    # Optimizer settings, with decay on the matrices and with decay on all parameters. 0.1 is the
    # weight decay of HPARAMS.
    decayed = [p for n, p in named_parameters.items() if get_kind(n) in ("hidden", "readout")]
    undecayed = [p for n, p in named_parameters.items() if get_kind(n) not in ("hidden", "readout")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}]
    all_decayed = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    for table, parameter_groups in ((rows, groups), (decayed_rows, all_decayed)):
        optimizer = mup.MuAdamW(
            parameter_groups,
            lr=HPARAMS.learning_rate,
            eps=HPARAMS.eps,
            betas=(HPARAMS.beta1, HPARAMS.beta2),
        )
        group_by_id = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in named_parameters.items():
            row, group = table[name], group_by_id[id(parameter)]
            expected = [group["lr"], group["weight_decay"], group["eps"], *group["betas"]]
            settings = [
                row.settings[setting]
                for setting in ("learning_rate", "weight_decay", "eps", "beta1", "beta2")
            ]
            assert settings == pytest.approx(expected, rel=1e-14), name

    # Width multipliers and initial stds
    for name, parameter in named_parameters.items():
        assert rows[name].width_multiplier == parameter.infshape.width_mult(), name
        base_std = base_rows[name].init_std
        expected_std = measure_mup_std(parameter, base_std) if base_std else 0
        assert rows[name].init_std == pytest.approx(expected_std, rel=1e-5), name

    # Forward multipliers
    forward = compute_forward_numbers(make_spec(shape, base))
    assert forward.output == pytest.approx(
        model.lm_head.output_mult / model.lm_head.width_mult(), rel=1e-14
    )
    assert forward.attention == pytest.approx(math.sqrt(base.head_dim) / shape.head_dim, rel=1e-14)
    assert forward.residual == forward.embedding == 1


def measure_mup_std(parameter, base_std):
    """Return the std with which mup's initializer draws a parameter, given the base's std."""
    torch.manual_seed(1)
    unit = torch.empty_like(parameter).normal_()
    torch.manual_seed(1)
    return (mup.init.normal_(parameter, std=base_std) / unit).mean().item()


def measure_difference(first, second, ids):
    """Return the largest difference of two models' logits before and after each of 20 steps.

    The difference is relative to the largest logit of the step.
    """
    differences = []
    for step in range(21):
        if step:
            first.step(ids)
            second.step(ids)
        with torch.no_grad():
            logits = first.compute_logits(ids)
            difference = logits - second.compute_logits(ids)
        differences.append((difference.abs().max() / logits.abs().max()).item())
    return max(differences)


def check_completedp_is_completep(shape, base):
    """Assert that Complete(d)P at the base batch and tokens is CompleteP with absorbed readout.

    Absorbed means that the readout's multiplier 1 / m is in its weights, where m is the width
    ratio. Weights that are m times smaller train in the same way if their learning rate is m times
    smaller, and if eps and weight decay are m times larger.
    """
    multiplied, direct = (
        make_spec(shape, base, name, **options)
        for name, options in (("completep", {"eps": "completedp"}), ("completedp", {}))
    )
    multiplier = shape.width / base.width
    for row, direct_row in zip(
        compute_parameter_table(multiplied), compute_parameter_table(direct), strict=True
    ):
        factor = multiplier if direct_row.kind == "readout" else 1.0
        numbers = {"init_std": row.init_std, **row.settings}
        direct_numbers = {"init_std": direct_row.init_std, **direct_row.settings}
        for field in ("init_std", "learning_rate"):
            expected = pytest.approx(direct_numbers[field] * factor, rel=1e-14)
            assert numbers[field] == expected, (row.name, field)
        for field in ("weight_decay", "eps"):
            expected = pytest.approx(direct_numbers[field] / factor, rel=1e-14)
            assert numbers[field] == expected, (row.name, field)
    first, second = TrainedDecoder.from_spec(multiplied), TrainedDecoder.from_spec(direct)
    assert measure_difference(first, second, draw_token_ids(shape)) < 1e-10


SIGN_STEP = Hparams(learning_rate=0.002, eps=1e-30)
"""A small step of Adam that depends only on the sign of the gradient."""


def measure_changes(spec, seed):
    """Return the root mean square change, in one AdamW step, of each branch's output.

    The keys include the residual stream, the logits (`lm_head`), and the part of the logits' change
    that is due to the readout's own update (`readout`).
    """
    model, ids = TrainedDecoder.from_spec(spec, seed), draw_token_ids(spec.shape, seed, 4)
    outputs = {}

    def make_hook(name):
        def keep_output(module, inputs, output):
            outputs[name] = output
            if name == "norm":
                outputs["stream"] = inputs[0]
            if name == "lm_head":
                outputs["readout's input"] = inputs[0]

        return keep_output

    branches = [
        n for n, _ in model.decoder.named_modules() if n.endswith((".attention", ".feed_forward"))
    ]
    for name in (*branches, "norm", "lm_head"):
        model.decoder.get_submodule(name).register_forward_hook(make_hook(name))
    with torch.no_grad():
        model.compute_logits(ids)
        outputs_before, readout_before = dict(outputs), model.decoder.lm_head.weight.clone()
    model.step(ids)
    with torch.no_grad():
        model.compute_logits(ids)
        # The change of the readout's input is multiplied by random weights, so its effect shrinks
        # with the square root of the width in every correct parametrization. The effect of the
        # readout's own update must not shrink.
        readout_update = model.decoder.lm_head.weight - readout_before
        changes = {"readout": outputs["readout's input"] @ readout_update.mT}
    for name in (*branches, "stream", "norm", "lm_head"):
        changes[name] = outputs[name] - outputs_before[name]
    return {name: change.square().mean().sqrt().item() for name, change in changes.items()}


def fit_slopes(shapes, base, parametrization, size):
    """Fit the slope of log2 change against log2 size for each of three seeds.

    Args:
        size: Function of a shape that returns its size.

    Returns:
        Mean slope over the seeds and half-width of its 90 % interval, by the names of
        `measure_changes`.
    """
    specs = [make_spec(shape, base, parametrization, SIGN_STEP) for shape in shapes]
    changes_by_seed = [[measure_changes(spec, seed) for spec in specs] for seed in range(3)]
    octaves = np.log2([size(shape) for shape in shapes])
    half_width = stats.t.ppf(0.95, 3 - 1) / math.sqrt(3)
    # Deep models have branches that shallow ones lack.
    shared_names = set.intersection(*(set(changes) for changes in changes_by_seed[0]))
    slopes_by_name = {}
    for name in shared_names:
        slopes = []
        for changes_by_shape in changes_by_seed:
            log2_changes = np.log2([changes[name] for changes in changes_by_shape])
            slopes.append(np.polyfit(octaves, log2_changes, 1)[0])
        slopes_by_name[name] = (float(np.mean(slopes)), float(np.std(slopes, ddof=1) * half_width))
    return slopes_by_name


WIDTHS_BASE = Shape(
    num_layers=2, width=32, num_heads=4, num_kv_heads=4, ffn_width=64, vocab_size=32, seq_len=8
)
"""Base of the shapes that differ in width."""
DEPTHS_BASE = WIDTHS_BASE.at_depth(1)
"""Base of the shapes that differ in depth.

It has one layer, so that the branches of the smallest depth are already scaled down.
"""


def measure_slopes_by_width(parametrization, family="llama"):
    """Return the slopes per doubling of width, from 32 to 256."""
    base = dataclasses.replace(WIDTHS_BASE, family=family)
    return fit_slopes(
        [base.at_width(w) for w in (32, 64, 128, 256)], base, parametrization, lambda s: s.width
    )


def measure_slopes_by_depth(parametrization):
    """Return the slopes per doubling of depth, from 4 to 16 layers."""
    shapes = [DEPTHS_BASE.at_depth(n) for n in (4, 8, 16)]
    return fit_slopes(shapes, DEPTHS_BASE, parametrization, lambda s: s.num_layers)


def check_moves_equally_at_every_width(parametrization, family="llama"):
    """Assert that one step changes every branch and the readout equally at every width."""
    for name, (slope, half_width) in measure_slopes_by_width(parametrization, family).items():
        # `measure_changes` says why the change of the logits shrinks; the norm rescales the stream.
        # A power that is wrong by 1/2 gives a slope of 0.5.
        if name not in ("lm_head", "norm"):
            assert abs(slope) + half_width < 0.35, (name, slope, half_width)


def check_moves_equally_at_every_depth(parametrization):
    """Assert that one step changes the stream and the logits equally at every depth.

    The change inside a block has the slope alpha - 1, so at alpha = 1 it is equal too.
    """
    slopes = measure_slopes_by_depth(parametrization)
    branches = ("layers.0.attention", "layers.0.feed_forward")
    names = ["stream", "lm_head"]
    if parametrization.depth_alpha == 1:
        names += branches
    for name in names:
        slope, half_width = slopes[name]
        assert abs(slope) + half_width < 0.3, (name, slope, half_width)
    for name in branches:
        assert slopes[name][0] == pytest.approx(parametrization.depth_alpha - 1, abs=0.25)
