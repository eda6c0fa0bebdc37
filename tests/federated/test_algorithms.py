"""Each algorithm against its formula by hand, without Flower."""

import pytest
import torch

import lightning_collider.federated as federated
from lightning_collider.federated.algorithms import Update
from lightning_collider.federated.settings import make_algorithm


def weights(value, count=0):
    return {"w": torch.tensor([value, 2 * value]), "count": torch.tensor(count)}


def update(value, base=0.0, base_version=0, corrected_version=None, examples=1, count=5):
    corrected = base_version if corrected_version is None else corrected_version
    return Update(weights(value, count), weights(base), base_version, corrected, examples)


def first(found):
    return found["w"][0].item()


def test_fedasync_mixes_with_polynomial_staleness():
    algorithm = federated.FedAsync(mixing=0.6, power=0.5)
    assert algorithm.share(0) == 0.6
    assert algorithm.share(3) == pytest.approx(0.6 * 4**-0.5, rel=1e-15)
    assert algorithm.share(50) == pytest.approx(0.6 / 51**0.5, rel=1e-15)
    # version 5, trained from 2: a_3 = 0.3, so 0.7 * 10 + 0.3 * 20
    new = algorithm.receive(weights(10.0), 5, update(20.0, base_version=2))
    assert first(new) == pytest.approx(13.0, rel=1e-6)
    assert new["count"].item() == 5  # counters are not averaged


def test_full_mixing_takes_the_clients_weights_to_the_bit():
    new = federated.FedAsync(1.0, 0.0).receive(weights(1e8), 9, update(0.1))
    assert torch.equal(new["w"], weights(0.1)["w"])


def test_fedavg_weighs_by_examples_and_waits_for_the_round():
    algorithm = federated.FedAvg()
    assert algorithm.synchronous and algorithm.close_round(weights(1.0)) is None
    assert algorithm.receive(weights(1.0), 0, update(10.0, examples=1)) is None
    assert algorithm.receive(weights(1.0), 0, update(20.0, examples=3)) is None
    assert first(algorithm.close_round(weights(1.0))) == pytest.approx((10 + 3 * 20) / 4)
    assert algorithm.close_round(weights(1.0)) is None


def test_fedbuff_adds_the_mean_change_of_its_buffer():
    algorithm = federated.FedBuff(buffer=2, server_rate=0.5, power=0.5)
    assert algorithm.receive(weights(10.0), 4, update(7.0, base=5.0, base_version=4)) is None
    new = algorithm.receive(weights(10.0), 4, update(9.0, base=3.0, base_version=1))
    # changes 2 with delay 0, and 6 with delay 3 and so the factor 1/2
    assert first(new) == pytest.approx(10 + 0.5 * (2 + 3) / 2)
    assert algorithm.receive(weights(10.0), 5, update(7.0)) is None  # the buffer is empty again


@pytest.mark.parametrize("name", ["fedavg", "fedbuff"])
def test_buffered_updates_survive_a_checkpoint(name):
    def feed(algorithm, value):
        return algorithm.receive(weights(1.0), 0, update(value, examples=2))

    whole, resumed = make_algorithm(name, {}), make_algorithm(name, {})
    for value in (3.0, 5.0):
        feed(whole, value)
    resumed.load_state_dict(whole.state_dict())
    for value in (4.0, 6.0, 8.0):
        a, b = feed(whole, value), feed(resumed, value)
    if name == "fedavg":
        a, b = whole.close_round(weights(1.0)), resumed.close_round(weights(1.0))
    assert first(a) == first(b) and a is not None


def test_fedadt_counts_delay_from_the_option_and_corrects_what_is_stale():
    stale = update(1.0, base_version=2, corrected_version=6)
    assert federated.FedADT(delay_from="base").delay(9, stale) == 7
    assert federated.FedADT(delay_from="correction").delay(9, stale) == 3
    algorithm = federated.FedADT(steps=4, temperature=3.0, lam_max=0.8, t_warm=0)
    plan = algorithm.correction(version=6, base_version=2)
    assert (plan.steps, plan.lam, plan.temperature) == (4, 0.8, 3.0)
    assert algorithm.correction(version=2, base_version=2).steps == 0
    assert federated.FedADT(schedule=lambda t: t / 10).correction(3, 0).lam == 0.3


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("fedsgd", {}, "one of fedavg, fedasync, fedbuff, fedadt"),
        ("fedadt", {"temprature": 1}, "did you mean 'temperature'"),
        ("fedadt", {"delay_from": "now"}, "one of base, correction"),
        ("fedadt", {"steps": -1}, "steps must not be negative"),
        ("fedadt", {"lam_max": 2}, "lam_max must be in"),
        ("fedasync", {"mixing": 0}, "mixing must be in"),
        ("fedasync", {"power": -1}, "power must not be negative"),
        ("fedbuff", {"buffer": 0}, "buffer must be at least 1"),
        ("fedavg", {"mixing": 1}, "it has none"),
    ],
)
def test_mistake_is_named(name, options, words):
    with pytest.raises(ValueError, match=words):
        make_algorithm(name, options)
