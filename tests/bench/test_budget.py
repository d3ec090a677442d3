"""A measurement ends in time, however slow the machine is, and a link fits the product."""

from __future__ import annotations

import pytest

from weft_tools.bench import budget as module
from weft_tools.bench.budget import PREPARING, Budget, fitted, shortest


class Machine:
    """A clock, and a product that takes the next of some times, at last always the last."""

    def __init__(self, *products):
        self.now = 0.0
        self.products = [*products]
        self.links = []
        self.tunings = 0

    def budget(self, seconds):
        return Budget(None, seconds, lambda: self.now)

    def product(self):
        took = self.products.pop(0) if len(self.products) > 1 else self.products[0]
        self.now += took
        return took

    def tune(self, budget):
        """Twenty candidates, each of which takes a product and as long on the link."""
        self.tunings += 1
        for _ in range(20):
            if not budget.left():
                return False
            self.now += self.product() + self.links[-1]
        return True

    def fit(self, seconds):
        return fitted(self.product, self.links.append, self.tune, self.budget(seconds))


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(module, "largest", lambda world, values: [*values])


def test_a_link_fits_the_product_of_an_idle_machine():
    machine = Machine(0.05, 0.04)
    assert machine.fit(100.0)
    assert machine.links == [0.04]
    assert machine.tunings == 1


def test_a_link_is_set_by_the_shortest_of_several_products():
    machine = Machine(*[1.1] * 5, 0.04, 1.1, 0.04)
    assert machine.fit(100.0)
    assert machine.links[-1] == 0.04


def test_a_link_that_was_set_while_the_machine_was_busy_is_set_again():
    machine = Machine(*[1.1] * 15, 0.04)
    assert machine.fit(100.0)
    assert machine.links == [1.1, 0.04]
    assert machine.tunings == 2


def test_a_machine_that_becomes_busy_does_not_change_the_link():
    machine = Machine(*[0.04] * 12, 1.1)
    machine.fit(100.0)
    assert machine.links == [0.04]


@pytest.mark.parametrize("product", [0.001, 0.4, 1.1, 3.0, 60.0])
@pytest.mark.parametrize("seconds", [0.0, 8.0, 20.0])
def test_preparing_ends_in_time_whatever_the_load(product, seconds):
    machine = Machine(product)
    machine.fit(PREPARING * seconds)
    # at least one product, and what had begun
    assert machine.now <= PREPARING * seconds + 3 * product
    assert machine.links == [product]


def test_the_shortest_time_of_few_or_many_rounds():
    for product, rounds in ((0.001, 10), (2.0, 3), (200.0, 1)):
        machine = Machine(product)
        assert shortest(machine.product, machine.budget(50.0)) == product
        assert machine.now == pytest.approx(rounds * product)


def test_a_part_of_what_is_left():
    machine = Machine(4.0)
    whole = machine.budget(10.0)
    machine.product()
    part = whole.part(0.5)
    assert part.left() == 3.0
    machine.product()
    assert (part.left(), whole.left()) == (0.0, 2.0)
    machine.product()
    assert whole.left() == 0.0
