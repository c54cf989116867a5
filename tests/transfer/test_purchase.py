import dataclasses

import numpy as np
import pytest

from transfer.design.added_seeds import SizeOption, choose_added_seeds


def offer(doublings, price=1.0, have=2.0, worth=1.0, variance=0.02):
    return SizeOption(
        size=round(1024 * 2**doublings),
        doublings=doublings,
        values=(0.0,),
        price=price,
        have=have,
        worth=worth,
        variance=variance,
    )


LINE = [offer(-5, price=5.0), offer(-4, price=20.0), offer(-3, price=80.0)]


def bought(extras=(), offers=LINE, narrowing=0.7, scatter=0.0, budget=1e9):
    return choose_added_seeds(offers, extras, narrowing=narrowing, scatter=scatter, budget=budget)


def spread(offers, seeds):
    """Variance at the target, by plain weighted least squares."""
    columns = np.array([[1.0, o.doublings] for o in offers])
    precision = np.array(
        [(o.have + o.worth * n) / o.variance for o, n in zip(offers, seeds, strict=True)]
    )
    return np.linalg.inv((columns.T * precision) @ columns)[0, 0]


def test_what_is_bought_narrows_as_much_as_is_wanted_and_costs_what_it_says():
    found = bought()
    assert found.variance == pytest.approx(spread(LINE, found.seeds))
    assert found.variance <= 0.7**2 * spread(LINE, (0, 0, 0))
    assert found.cost == sum(n * o.price for n, o in zip(found.seeds, LINE, strict=True))


def test_no_other_purchase_of_as_little_money_narrows_more():
    found = bought()
    others = [
        (a, b, c)
        for a in range(20)
        for b in range(8)
        for c in range(4)
        if 5 * a + 20 * b + 80 * c < found.cost
    ]
    enough = [seeds for seeds in others if spread(LINE, seeds) <= 0.7**2 * spread(LINE, (0, 0, 0))]
    least = min((5 * a + 20 * b + 80 * c for a, b, c in enough), default=found.cost)
    assert least >= 0.9 * found.cost  # trading single seeds finds nearly the best


def test_a_new_size_is_bought_where_seeds_would_cost_more():
    free = [dataclasses.replace(o, price=5.0) for o in LINE]
    near = offer(-1, price=5.0, have=0.0)
    found = bought([near], offers=free, narrowing=0.4)
    assert found.offers[-1] == near and found.seeds[-1] >= 1
    dear = dataclasses.replace(near, price=1e6)
    assert dear not in bought([dear], offers=free, narrowing=0.4).offers


def test_scatter_is_not_averaged_away_by_seeds():
    found = bought(narrowing=0.5, scatter=0.5)
    assert (
        found.variance
        > 0.25 * choose_added_seeds(LINE, [], narrowing=1.0, scatter=0.5, budget=0.0).variance
    )
    with_size = bought([offer(-1, price=80.0, have=0.0)], narrowing=0.5, scatter=0.5)
    assert with_size.seeds[-1] >= 1
