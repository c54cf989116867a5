import dataclasses
import math
import statistics

import mup
import pytest
import torch
from mup_reference import Reference, mup_model
from proxy_cases import BASE
from torch import nn

from proxies import parametrization
from proxies.canon import canonical
from proxies.checks import SpecError
from proxies.model import Decoder, Multipliers, parameter_shapes
from proxies.parametrization import (
    forward_numbers,
    initial_tensor,
    kind_of,
    name_seed,
    parameter_table,
    stack_forward_numbers,
    width_multipliers,
)
from proxies.spec import Hparams

HPARAMS = Hparams(learning_rate=0.01, weight_decay=0.1, beta1=0.85, eps=1e-9, output_multiplier=3.0)
WIDTHS = (16, 32, 64, 112)


def table(name, shape, base_shape=BASE, hparams=HPARAMS):
    return {numbers.name: numbers for numbers in parameter_table(name, shape, base_shape, hparams)}


def decoder(shape, numbers, seed=0, dtype=torch.float32):
    model = Decoder(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_tensor(numbers[name], seed))
    return model.to(dtype)


def test_names_sizes_and_order_are_the_modules_own():
    shape = BASE.at_width(32)
    rows = parameter_table("mup", shape, BASE, HPARAMS)
    assert {row.name: row.size for row in rows} == parameter_shapes(shape)
    assert [row.name for row in rows] == [name for name, _ in Decoder(shape, device="meta").named_parameters()]
    assert parameter_shapes(shape) == {name: tuple(p.shape) for name, p in Reference(shape).named_parameters()}
    assert {row.kind for row in rows} == {"embedding", "hidden", "readout", "norm"}
    assert [kind_of(name) for name in ("layers.0.attention_norm.weight", "norm.weight")] == ["norm", "norm"]


@pytest.mark.parametrize("width", WIDTHS)
def test_rates_and_decays_are_mups(width):
    """Tensor by tensor against MuAdamW's own groups on a model that mup itself set up."""
    model = mup_model(BASE.at_width(width), BASE)
    decayed, kept = [], []
    for name, parameter in model.named_parameters():
        (decayed if kind_of(name) in ("hidden", "readout") else kept).append(parameter)
    groups = [
        {"params": decayed, "lr": HPARAMS.learning_rate, "weight_decay": HPARAMS.weight_decay},
        {"params": kept, "lr": HPARAMS.learning_rate, "weight_decay": 0.0},
    ]
    optimizer = mup.MuAdamW(groups, lr=HPARAMS.learning_rate, eps=HPARAMS.eps, betas=(HPARAMS.beta1, HPARAMS.beta2))
    theirs = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    ours = table("mup", BASE.at_width(width))
    for name, parameter in model.named_parameters():
        group, numbers = theirs[id(parameter)], ours[name]
        assert numbers.learning_rate == pytest.approx(group["lr"], rel=1e-15), name
        assert numbers.weight_decay == pytest.approx(group["weight_decay"], rel=1e-15), name
        assert (numbers.eps, (numbers.beta1, numbers.beta2)) == (group["eps"], group["betas"])
        assert numbers.width_multiplier == parameter.infshape.width_mult()
    if width > BASE.width:
        assert len({row.learning_rate for row in ours.values()}) == 2


@pytest.mark.parametrize("width", WIDTHS)
def test_forward_multipliers_are_mups(width):
    shape = BASE.at_width(width)
    model = mup_model(shape, BASE, output_mult=HPARAMS.output_multiplier)
    forward = forward_numbers("mup", shape, BASE, HPARAMS)
    assert forward.output == pytest.approx(model.lm_head.output_mult / model.lm_head.width_mult(), rel=1e-15)
    assert forward.attention == pytest.approx(model.scale, rel=1e-15)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["mup", "sp"])
def test_logits_are_the_reference_models(name, width):
    shape, torch_seed = BASE.at_width(width), torch.manual_seed(width)
    if name == "mup":
        theirs = mup_model(shape, BASE, output_mult=HPARAMS.output_multiplier)
    else:
        theirs = Reference(shape)
    ours, hparams = Decoder(shape), HPARAMS if name == "mup" else Hparams(learning_rate=1.0)
    ours.load_state_dict(theirs.state_dict())
    ours, theirs = ours.double(), theirs.double()
    ids = torch.randint(shape.vocab_size, (3, shape.seq_len), generator=torch_seed)
    forward = forward_numbers(name, shape, BASE, hparams)
    logits = ours(ids, Multipliers(**dataclasses.asdict(forward)))
    difference = (logits - theirs(ids).flatten(0, 1)).abs().max()
    assert difference < 1e-12 * max(1.0, logits.abs().max().item())


def test_initial_sizes_scale_as_mups_rescaled_default():
    """Against the base, a hidden std falls as the root of the multiplier; embedding and readout keep theirs."""
    wide = BASE.at_width(8 * BASE.width)
    torch.manual_seed(0)
    theirs = {
        width: {name: p.std().item() for name, p in mup_model(shape, BASE).named_parameters()}
        for width, shape in ((1, BASE), (8, wide))
    }
    base, ours = table("mup", BASE), table("mup", wide)
    for name, numbers in ours.items():
        if numbers.kind == "norm":
            continue
        ratio = numbers.init_std / base[name].init_std
        assert ratio == pytest.approx(1 if numbers.kind != "hidden" else 8**-0.5)
        assert ratio == pytest.approx(theirs[8][name] / theirs[1][name], rel=0.1), name


def test_initial_sizes_are_those_of_mups_own_normal():
    """`mup.init.normal_` given the base's std draws with our std at every width."""
    shape = BASE.at_width(64)
    model, base, ours = mup_model(shape, BASE), table("mup", BASE), table("mup", shape)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ours[name].kind != "norm":
            mup.init.normal_(parameter, std=base[name].init_std)
            assert parameter.std().item() == pytest.approx(ours[name].init_std, rel=0.06), name


def test_drawn_values_have_the_tables_std():
    for numbers in table("mup", BASE.at_width(64)).values():
        values = initial_tensor(numbers, 3)
        assert values.dtype == torch.float32 and tuple(values.shape) == numbers.size
        if numbers.kind == "norm":
            assert values.eq(1).all() and numbers.init_std == 0
        else:
            assert values.std().item() == pytest.approx(numbers.init_std, rel=0.06)
            assert abs(values.mean().item()) < 5 * numbers.init_std / math.sqrt(values.numel())


def test_standard_parametrization():
    shape = BASE.at_width(64)
    for numbers in table("sp", shape).values():
        assert numbers.learning_rate == HPARAMS.learning_rate
        assert numbers.weight_decay == (0.1 if numbers.kind in ("hidden", "readout") else 0)
        wanted = {"norm": 0.0, "embedding": 1.0}.get(numbers.kind, 1 / math.sqrt(numbers.size[-1]))
        assert numbers.init_std == wanted
    forward = forward_numbers("sp", shape, BASE, HPARAMS)
    assert (forward.attention, forward.output) == (pytest.approx(8**-0.5, rel=1e-15), 3.0)


def test_at_the_base_both_are_the_same_function():
    sp, mu = table("sp", BASE), table("mup", BASE)
    assert canonical(list(sp.values())) == canonical(list(mu.values()))
    forwards = [forward_numbers(name, BASE, BASE, HPARAMS) for name in ("sp", "mup")]
    ids = torch.arange(2 * BASE.seq_len).view(2, -1) % BASE.vocab_size
    logits = [
        decoder(BASE, numbers)(ids, Multipliers(**dataclasses.asdict(forward)))
        for numbers, forward in zip((sp, mu), forwards, strict=True)
    ]
    assert torch.equal(*logits)
    wide = [table(name, BASE.at_width(32)) for name in ("sp", "mup")]
    assert canonical(list(wide[0].values())) != canonical(list(wide[1].values()))


def test_logits_at_the_start_shrink_with_width_only_under_mup():
    """mup's readout keeps its std and divides its input: logits fall as the root of width, at standard they stay."""
    sizes = {}
    for name in ("sp", "mup"):
        for width in (16, 256):
            shape = BASE.at_width(width)
            forward = forward_numbers(name, shape, BASE, Hparams(learning_rate=1.0))
            ids = torch.arange(4 * BASE.seq_len).view(4, -1) % BASE.vocab_size
            stds = [
                decoder(shape, table(name, shape), seed)(ids, Multipliers(**dataclasses.asdict(forward))).std().item()
                for seed in range(3)
            ]
            sizes[name, width] = statistics.mean(stds)
    assert sizes["sp", 256] / sizes["sp", 16] == pytest.approx(1, rel=0.15)
    assert sizes["mup", 256] / sizes["mup", 16] == pytest.approx(1 / 4, rel=0.15)


def test_initial_values_depend_on_seed_and_name_alone():
    numbers = table("mup", BASE)
    forward = {name: initial_tensor(row, 5) for name, row in numbers.items()}
    torch.manual_seed(99)
    backward = {name: initial_tensor(row, 5) for name, row in reversed(numbers.items())}
    assert all(torch.equal(forward[name], backward[name]) for name in numbers)
    query = "layers.0.attention.wq.weight"
    assert not torch.equal(forward[query], initial_tensor(numbers[query], 6))
    assert not torch.equal(forward[query], forward["layers.0.attention.wo.weight"])
    assert len({name_seed(seed, name) for seed in range(20) for name in numbers}) == 20 * len(numbers)
    assert name_seed(1, "a") == 53794261220561053


def test_a_wrong_base_shows_in_the_table():
    """mup says nothing about a wrong base; here every multiplier is in the table that is frozen with the run."""
    wide, wrong = BASE.at_width(64), BASE.at_width(32)
    query = "layers.0.attention.wq.weight"
    assert [table("mup", wide, base)[query].width_multiplier for base in (BASE, wrong, wide)] == [4.0, 2.0, 1.0]
    fat = dataclasses.replace(wide, ffn_width=2 * wide.ffn_width)
    rows = table("mup", fat)
    assert (rows["layers.0.feed_forward.w2.weight"].width_multiplier, rows[query].width_multiplier) == (8.0, 4.0)


@pytest.mark.parametrize("delta", ["the base itself", "none"])
def test_the_delta_is_ours_so_that_no_dimension_is_missed(delta):
    """With the base as delta (or none) mup holds every dimension for finite, silently; ours cannot."""
    shape, query = BASE.at_width(64), "layers.0.attention.wq.weight"
    if delta == "none":
        silent = mup.set_base_shapes(Reference(shape, readout=mup.MuReadout), None)
        assert silent.lm_head.width_mult() == 1
        assert dict(silent.named_parameters())[query].infshape.ninf() == 0
    else:
        silent = mup_model(BASE, BASE, delta_shape=BASE)
        assert dict(silent.named_parameters())[query].infshape.ninf() == 0
    assert width_multipliers(BASE, BASE)[query] == (1.0, 2)
    assert width_multipliers(shape, BASE)[query] == (4.0, 2)


@pytest.mark.parametrize("changes", [{"num_layers": 3}, {"num_heads": 4, "num_kv_heads": 2}])
def test_a_base_that_differs_in_more_than_width_is_refused(changes):
    with pytest.raises(ValueError, match="differ in more than width"):
        parameter_table("mup", BASE.at_width(32), dataclasses.replace(BASE, **changes), HPARAMS)


def test_tied_matrices_are_refused_under_mup():
    tied = dataclasses.replace(BASE, tied=True)
    with pytest.raises(ValueError, match="tied = true under mup"):
        parameter_table("mup", tied.at_width(32), tied, HPARAMS)
    assert "lm_head.weight" not in table("sp", tied, tied)


def test_an_unfit_width_is_refused():
    with pytest.raises(SpecError):
        parameter_table("mup", BASE.at_width(20), BASE, HPARAMS)


def test_the_comparison_can_fail(monkeypatch):
    """Planted: a readout whose rate is divided too, as in papers' table 3, is not mup 1.0.0."""
    real = parametrization.width_multipliers
    monkeypatch.setattr(
        parametrization, "width_multipliers", lambda *shapes: {n: (m, 2) for n, (m, _) in real(*shapes).items()}
    )
    with pytest.raises(AssertionError, match=r"tok_embeddings|norm|lm_head"):
        test_rates_and_decays_are_mups(32)


def test_multipliers_are_stacked_per_trial():
    numbers = [forward_numbers(name, BASE.at_width(32), BASE, HPARAMS) for name in ("sp", "mup")]
    stacked = stack_forward_numbers(numbers, torch.float64)
    assert stacked.output.shape == (2, 1, 1) and stacked.output.dtype == torch.float64
    assert stacked.output.flatten().tolist() == [3.0, 1.5]


def test_the_reference_is_no_copy_of_ours():
    assert isinstance(Reference(BASE).layers[0].attention.wq, nn.Linear)
    assert isinstance(mup_model(BASE, BASE).lm_head, mup.MuReadout)
