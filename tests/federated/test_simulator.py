"""Server, client and simulator together: equalities between algorithms, and what time means."""

import time

import pytest
import torch
from torch.nn import functional as F

from lightning_collider.federated.digits import Digits
from lightning_collider.federated.distillation import distillation_loss
from lightning_collider.federated.messages import weights_of
from lightning_collider.federated.tasks import dirichlet_split, mixed_seed
from tests.federated.small import OPTIONS, Federation, recipe, same_weights

STALE = {"speed_sigma": 1.0}


def test_runs_of_one_seed_are_equal_and_learn():
    chosen = recipe(server={"max_updates": 24}, client={"epochs": 3})
    first, again = Federation(chosen), Federation(chosen)
    assert same_weights(first.run().weights, again.run().weights)
    assert first.journal.rows == again.journal.rows
    accuracies = [row["accuracy"] for row in first.journal.of("evaluation")]
    assert accuracies[0] < 0.2 and accuracies[-1] > 0.3
    assert [row["updates"] for row in first.journal.of("evaluation")] == list(range(0, 25, 4))


def test_without_distillation_steps_fedadt_is_fedasync_to_the_bit():
    """Two messages a round instead of one, and the weights kept in the client's Context."""
    options = {"mixing": 0.7, "power": 0.5}
    plain = Federation(recipe("fedasync", options, simulation=STALE))
    corrected = Federation(
        recipe("fedadt", {**options, "steps": 0, "delay_from": "base"}, simulation=STALE)
    )
    assert same_weights(plain.run().weights, corrected.run().weights)
    delays = [[row["delay"] for row in f.journal.of("update")] for f in (plain, corrected)]
    assert delays[0] == delays[1] and max(delays[0]) >= 3
    distilled = Federation(recipe("fedadt", {**options, "steps": 1}, simulation=STALE))
    assert not same_weights(plain.server.state.weights, distilled.run().weights)


@pytest.mark.parametrize("algorithm", ["fedadt", "fedasync"])
def test_one_client_with_full_mixing_is_plain_training(algorithm):
    """a = 1, no delay, the optimizer's state kept: the loop a user would write himself."""
    alone = {"clients": 1, "momentum": 0.9, "learning_rate": 0.02}
    chosen = recipe(
        algorithm,
        {"mixing": 1.0},
        server={"max_updates": 5},
        client={"keep_optimizer": True, "epochs": 2},
        task=alone,
    )
    task = Digits(seed=chosen.seed, **{**OPTIONS, **alone})
    module = task.module()
    optimizer = module.configure_optimizers()
    for job in range(5):
        for epoch in range(2):
            seed = mixed_seed(mixed_seed(chosen.seed, 0, job, 0), epoch)
            for images, digits in task.batches(0, seed):
                F.cross_entropy(module(images), digits).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert same_weights(Federation(chosen).run().weights, weights_of(module))


def test_a_stale_update_is_corrected_as_the_formula_says():
    """Two clients; the slow one's first update, with its teacher, computed by hand."""
    options = {"mixing": 0.5, "power": 0.0, "steps": 2, "temperature": 2.0, "lam_max": 0.6}
    chosen = recipe(
        "fedadt",
        {**options, "t_warm": 3},
        server={"max_updates": 30},
        simulation={"speed_sigma": 1.5},
        task={"clients": 2},
    )
    seen = {}

    def watch(message, context, reply):
        order = message.content["order"]
        if "lam" in order and order["steps"] and "order" not in seen:
            seen.update(order=order, context=context, before=trained[context.node_id])
            seen.update(teacher=message.content["weights"], reply=reply)
        if "extra_steps" in order:
            trained[context.node_id] = context.state["trained"]
        return reply

    trained = {}
    federation = Federation(chosen, watch)
    federation.run()
    order, number = seen["order"], seen["context"].node_config["partition-id"]
    assert order["lam"] == pytest.approx(0.6 * (1 - 2.718281828459045 ** (-order["version"] / 3)))
    task = federation.task
    student, teacher = task.module(), task.module()
    student.load_state_dict({n: torch.from_numpy(a.numpy()) for n, a in seen["before"].items()})
    teacher.load_state_dict({n: torch.from_numpy(a.numpy()) for n, a in seen["teacher"].items()})
    optimizer = student.configure_optimizers()
    seed = mixed_seed(mixed_seed(chosen.seed, number, order["job"], 1), 0)
    for images, digits in list(task.batches(number, seed))[:2]:
        loss = distillation_loss(
            student(images), teacher(images).detach(), digits, order["lam"], 2.0
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, array in seen["reply"].content["weights"].items():
        assert torch.equal(torch.from_numpy(array.numpy()), weights_of(student)[name]), name


def test_time_is_work_over_speed():
    """One client, no noise: each job costs its examples, distillation would cost 4/3 of them."""
    quiet = {"speed_sigma": 0.0, "jitter_sigma": 0.0, "latency": 0.25}
    one = Federation(recipe(simulation=quiet, task={"clients": 1}, server={"max_updates": 3}))
    one.run()
    each = one.task.examples(0) / 100.0 + 2 * 0.25
    assert [row["seconds"] for row in one.journal.of("update")] == pytest.approx(
        [each, 2 * each, 3 * each]
    )
    two = Federation(
        recipe(
            "fedadt", {"steps": 3}, simulation=quiet, task={"clients": 2}, server={"max_updates": 2}
        )
    )
    two.run()
    first, second = two.journal.of("update")
    assert not first["corrected"] and second["corrected"]
    slower = max(two.task.examples(0), two.task.examples(1))
    distilled = 3 * 64 * 4 / 3 / 100.0
    assert second["seconds"] == pytest.approx(slower / 100.0 + 4 * 0.25 + distilled)
    assert two.server.state.correction_work == pytest.approx(3 * 64 * 4 / 3)


def test_fedavg_waits_for_the_slowest_of_each_round():
    federation = Federation(recipe("fedavg", simulation=STALE))
    state = federation.run()
    assert (state.version, state.updates) == (3, 12)
    rows = federation.journal.of("update")
    assert all(row["delay"] == 0 for row in rows)
    ends = [max(row["seconds"] for row in rows[i : i + 4]) for i in (0, 4, 8)]
    assert [r["seconds"] for r in federation.journal.of("evaluation")] == [0.0, *ends]


def test_late_clients_join_and_dead_ones_come_back():
    federation = Federation(
        recipe(
            server={"max_updates": 40},
            simulation={"dropout": 0.2, "absence": 5.0, "late_share": 0.6, "late_by": 20.0},
        )
    )
    late = [c for c in federation.simulator.clients.values() if c.joins_at]
    assert late
    federation.run()
    rows = federation.journal.of("update")
    for client in late:
        assert min(r["seconds"] for r in rows if r["client"] == client.node) > client.joins_at
    lost = federation.journal.of("lost")
    assert lost and all("died" in row["reason"] for row in lost)
    dead = lost[0]
    later = [r for r in rows if r["client"] == dead["client"] and r["seconds"] > dead["seconds"]]
    assert later and later[0]["seconds"] > dead["seconds"] + 5.0


def test_dirichlet_split_is_a_partition_and_more_even_with_a_large_alpha():
    labels = Digits(seed=0)._test[1].numpy()

    def classes(alpha):
        parts = dirichlet_split(labels, 6, alpha, seed=1, smallest=3)
        assert sorted(i for part in parts for i in part) == list(range(len(labels)))
        assert min(map(len, parts)) >= 3
        return sum(len(set(labels[part])) for part in parts) / 6

    assert classes(0.1) < 6 < classes(100.0) == 10
    with pytest.raises(ValueError, match="cannot be split among 40 clients of at least 50"):
        dirichlet_split(labels, 40, 0.1, seed=0, smallest=50)


@pytest.mark.slow
def test_hundred_clients_and_two_thousand_updates_in_ten_minutes():
    start = time.process_time()  # on one core, whatever else the machine does
    state = Federation(
        recipe(
            "fedadt",
            {"steps": 2},
            server={"max_updates": 2000, "evaluate_every": 100, "checkpoint_every": 10**6},
            task={"clients": 100, "dirichlet": 0.5, "batch_size": 32, "smallest": 1},
            client={"epochs": 5},
        )
    ).run()
    assert state.updates == 2000 and time.process_time() - start < 600
