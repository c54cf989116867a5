"""Published grids of runs with their sources, each as a table that a user would type in.

GPT-speedrun-TPU (github.com/honglu2875/GPT-speedrun-TPU): docs/HYPERPARAMETER_TRANSFER.md,
docs/GRADIENT_SPIKES.md, docs/LR_TRANSFER.md of August 2026, docs/reports/duration-ablation.md.
Sizes are numbers of parameters. The rate is the `base LR` of that project, which its trainer
multiplies by sqrt(batch / 128 * 60M / parameters). Clipping is off. If only the mean of three seeds
is printed, it is one row here. If single seeds are printed, each is a row. If mean and sample
standard deviation are printed, the rows are mean - sd, mean, and mean + sd, which have that mean
and that standard deviation. Such rows carry no seed, because the seed of each loss is unknown.

microsoft/mup, issue 66: nanoGPT under muP with one seed, in a setup that is known to be broken.
"""

from __future__ import annotations

import math

FIRST_SEED = 1337
# Parameters, width, layers
SMALL, MIDDLE, LARGE, HUGE = (
    (59_918_208, 384, 12),
    (123_456_640, 640, 12),
    (244_444_032, 896, 16),
    (502_602_240, 1280, 19),
)

# 5 tokens per parameter, batch 128: log2 of the rate, and the mean of three seeds.
MEANS = {
    SMALL: {-6: 4.1161, -7: 4.1469, -8: 4.0143, -9: 4.0546, -10: 4.2304},
    MIDDLE: {-7: 3.7135, -8: 3.6823, -9: 3.7269},
    LARGE: {-6: 3.48843, -7: 3.44372, -8: 3.42985, -9: 3.47398},
}
# Losses by seed (1337, 1338, 1339), where they are printed. For 125M at 2^-7, the second loss is
# computed from the mean.
LOSSES_BY_SEED = {
    (SMALL, -6): (4.0956, 4.1239, 4.1289),
    (SMALL, -7): (4.1611, 4.1285, 4.1510),
    (MIDDLE, -7): (3.7230, 3.6784, 3.7391),
    (LARGE, -6): (3.48473, 3.50071, 3.47985),
    (LARGE, -7): (3.41767, 3.43316, 3.48032),
    (LARGE, -8): (3.44069, 3.42441, 3.42447),
    (LARGE, -9): (3.47342, 3.47682, 3.47172),
}
# 60M, 5 tokens per parameter: means of three seeds by batch, then by rate.
MEANS_BY_BATCH = {
    32: {-6: 4.1081, -7: 4.1274, -8: 4.0664, -9: 4.0792, -10: 4.1915},
    64: {-6: 4.1106, -7: 4.0641, -8: 4.0264, -9: 4.0596, -10: 4.1938},
    128: MEANS[SMALL],
    256: {-6: 4.4324, -7: 4.4725, -8: 4.4638, -9: 4.3343, -10: 4.5049},
    512: {-6: 5.5062, -7: 5.2964, -8: 5.2473, -9: 5.4108, -10: 5.6684},
}
# 125M, 20 tokens per parameter, batch 128: mean and sample standard deviation of three seeds.
LONG_RUNS = {-7: (3.41684, 0.00147), -8: (3.40848, 0.00100), -9: (3.42462, 0.00100)}

BROKEN_MUP = {
    96: {-8: 4.1291, -9: 4.1184, -10: 4.1627, -11: 4.2398, -12: 4.3393},
    192: {-8: 3.7287, -9: 3.7086, -10: 3.7074, -11: 3.7363, -12: 3.8111},
    384: {-8: 3.4713, -9: 3.4041, -10: 3.3809, -11: 3.3776, -12: 3.4135},
    768: {-8: math.nan, -10: 3.1226, -11: 3.1009, -12: 3.1074},
}


def format_speedrun(seeds: tuple[int, ...]):
    """Return the grid with 5 tokens per parameter. If `seeds` are given, cells whose single seeds
    are known have one row for each of them. All other cells have one row with the mean.
    """
    lines = ["params,d_model,num_layers,lr,seed,loss"]
    for size in (SMALL, MIDDLE, LARGE):
        for octave, mean in MEANS[size].items():
            known = LOSSES_BY_SEED.get((size, octave), ())
            rows = (
                [(seed, known[seed - FIRST_SEED]) for seed in seeds]
                if known and seeds
                else [(FIRST_SEED, mean)]
            )
            lines += [format_row(*size, 2.0**octave, seed, loss) for seed, loss in rows]
    return "\n".join(lines)


def format_batches():
    """Return the grid of batch sizes of the model with 60M parameters. A batch size is a number of
    sequences of 1,024 tokens.
    """
    cells = MEANS_BY_BATCH.items()
    rows = [
        format_row(batch, 2.0**octave, loss) for batch, row in cells for octave, loss in row.items()
    ]
    return "\n".join(["batch_size,lr,loss", *rows])


def format_durations():
    """Return the runs of 125M at 5 and at 20 tokens per parameter.

    Their corpora differ. That shifts the losses and, as we assume, not the optimum.
    """
    short = [format_row(5 * MIDDLE[0], 2.0**octave, loss) for octave, loss in MEANS[MIDDLE].items()]
    long = [
        format_row(20 * MIDDLE[0], 2.0**octave, loss)
        for octave, cell in LONG_RUNS.items()
        for loss in spread_losses(cell)
    ]
    return "\n".join(["tokens,lr,loss", *short, *long])


def spread_losses(cell):
    """Return three losses with this mean and sample standard deviation."""
    mean, sd = cell
    return tuple(round(loss, 5) for loss in (mean - sd, mean, mean + sd))


def format_by_width(grid):
    """Return a table from {width: {log2 of the rate: loss}}."""
    rows = [
        format_row(width, 2.0**octave, loss)
        for width, row in grid.items()
        for octave, loss in row.items()
    ]
    return "\n".join(["width,lr,loss", *rows])


def format_optima(sizes, rates):
    """Return a table of optima."""
    return "\n".join(["width,lr_optimum", *map(format_row, sizes, rates)])


def format_row(*cells):
    return ",".join(map(str, cells))
