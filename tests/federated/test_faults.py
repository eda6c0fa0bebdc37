"""What clients and the server may do wrong: refused or weighted, logged with the client's id."""

import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from lightning_collider.federated.simulator import FIRST_NODE
from lightning_collider.federated.state import Journal, read_rows
from tests.federated.small import Federation, recipe, same_weights

BAD = FIRST_NODE + 2  # the client that misbehaves


def with_array(reply, change):
    """The reply with its first array changed."""
    arrays = {name: a.numpy() for name, a in reply.content["weights"].items()}
    name = next(iter(arrays))
    arrays = change(arrays, name)
    reply.content["weights"] = ArrayRecord({n: Array(a) for n, a in arrays.items()})
    return reply


def not_a_number(arrays, name):
    arrays[name] = arrays[name].copy()
    arrays[name].flat[0] = float("nan")
    return arrays


def damaged(reply):
    next(iter(reply.content["weights"].values())).data = b"no array"
    return reply


def other_type(reply):
    reply.content["report"]["examples"] = "many"
    return reply


def emptied(reply):
    reply.content = RecordDict()
    return reply


FAULTS = {
    "NaN": (lambda r: with_array(r, not_a_number), "is not finite"),
    "shape": (lambda r: with_array(r, lambda a, n: {**a, n: a[n][:2]}), "has shape"),
    "dtype": (lambda r: with_array(r, lambda a, n: {**a, n: a[n].astype("float64")}), "float64"),
    "model": (lambda r: with_array(r, lambda a, n: {"other": a[n]}), "another model's: lacking"),
    "bytes": (damaged, "cannot be read"),
    "report": (other_type, "report.examples must be of type int"),
    "empty": (emptied, "no record 'report'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_reply_is_refused_and_the_server_goes_on(fault):
    spoil, words = FAULTS[fault]

    def change(message, context, reply):
        return spoil(reply) if context.node_id == BAD else reply

    federation = Federation(recipe(), change)
    state = federation.run()
    assert state.updates == 12 and all(torch.isfinite(w).all() for w in state.weights.values())
    refused = federation.journal.of("refused")
    assert {row["client"] for row in refused} == {BAD} and len(refused) == 3
    assert all(words in row["reason"] for row in refused)
    assert refused[-1]["reason"].endswith("After 3 in a row it gets no more work")
    assert BAD not in {row["client"] for row in federation.journal.of("update")}


def test_client_whose_code_fails_is_named_with_the_error():
    def change(message, context, reply):
        if context.node_id == BAD:
            raise OSError("disk full")
        return reply

    federation = Federation(recipe(), change)
    assert federation.run().updates == 12
    assert all("OSError: disk full" in r["reason"] for r in federation.journal.of("refused"))


def test_one_bad_reply_is_forgiven():
    spoiled = []

    def change(message, context, reply):
        if context.node_id == BAD and not spoiled:
            spoiled.append(True)
            return with_array(reply, not_a_number)
        return reply

    federation = Federation(recipe(), change)
    federation.run()
    assert [row["client"] for row in federation.journal.of("refused")] == [BAD]
    assert BAD in {row["client"] for row in federation.journal.of("update")}


def test_second_reply_is_refused():
    once, twice = Federation(recipe()), Federation(recipe())
    pull = twice.simulator.pull_messages

    def pull_twice(ids):
        return [r for r in pull(ids) for _ in range(2 if r.metadata.src_node_id == BAD else 1)]

    twice.simulator.pull_messages = pull_twice
    assert same_weights(once.run().weights, twice.run().weights)
    refused = twice.journal.of("refused")
    assert refused and all(r["client"] == BAD and "second" in r["reason"] for r in refused)
    updates = [(r["client"], r["job"]) for r in twice.journal.of("update")]
    assert len(updates) == len(set(updates)) == 12


@pytest.mark.parametrize("max_delay", [None, 20])
def test_update_fifty_versions_late_is_weighted_or_refused(max_delay):
    federation = Federation(
        recipe(
            "fedasync",
            {"mixing": 0.6, "power": 0.5},
            server={"max_updates": 60, "max_delay": max_delay, "checkpoint_every": 1000},
            simulation={"jitter_sigma": 0.0},
            task={"clients": 2},
        )
    )
    slow, fast = federation.simulator.clients.values()
    share = federation.task.examples(0) / federation.task.examples(1)
    slow.speed = fast.speed * share / 55  # 55 jobs of the fast one
    federation.run()
    late = [r for r in federation.journal.of("update") if r["client"] == slow.node]
    if max_delay is None:
        (row,) = late
        assert row["delay"] >= 50
        assert row["share"] == pytest.approx(0.6 * (1 + row["delay"]) ** -0.5)
    else:
        assert not late
        (row,) = federation.journal.of("refused")
        assert row["client"] == slow.node and "above max_delay=20" in row["reason"]


def test_client_that_never_replies_is_given_up_at_its_timeout():
    federation = Federation(recipe(server={"job_timeout": 20.0, "max_updates": 60}))
    federation.simulator.clients[BAD].speed = 1e-9
    assert federation.run().updates == 60
    lost = federation.journal.of("lost")
    assert lost and {row["client"] for row in lost} == {BAD}
    assert lost[0]["seconds"] == pytest.approx(20.0)


def test_run_without_clients_fails_with_the_reason():
    federation = Federation(recipe(server={"min_clients": 9}))
    with pytest.raises(RuntimeError, match=r"patience=50.0 s: 4 are connected .*min_clients=9"):
        federation.run()

    def fail(message, context, reply):
        raise ValueError("no")

    with pytest.raises(RuntimeError, match="4 were refused too often"):
        Federation(recipe(), fail).run()


class Killed(Exception):
    """Stands for SIGKILL: nothing of the server runs after it."""


@pytest.mark.parametrize("algorithm", ["fedasync", "fedbuff", "fedadt"])
def test_killed_server_resumes_and_counts_no_update_twice(tmp_path, algorithm):
    """Killed behind an update that is not in the checkpoint, with all clients at work."""
    options = {"buffer": 3} if algorithm == "fedbuff" else {}
    chosen = recipe(algorithm, options, server={"max_updates": 20, "checkpoint_every": 3})
    log, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "server.ckpt"
    federation = Federation(chosen, journal=Journal(log), checkpoint=checkpoint)
    count = federation.server._count

    def dying(job, report, weights):
        count(job, report, weights)
        if federation.server.state.updates == 8:
            raise Killed

    federation.server._count = dying
    with pytest.raises(Killed):
        federation.run()
    assert len([r for r in read_rows(log) if r["event"] == "update"]) == 8
    federation.journal = Journal(log)
    federation.start_server(checkpoint)
    assert federation.server.state.updates == 6  # the newest multiple of checkpoint_every
    before = federation.server.seconds()
    state = federation.run()
    rows = [r for r in read_rows(log) if r["event"] == "update"]
    jobs = [(r["client"], r["job"]) for r in rows]
    assert state.updates == 20 == len(jobs) == len(set(jobs))
    assert [r["updates"] for r in rows] == list(range(1, 21))
    assert sorted(r["seconds"] for r in rows) == [r["seconds"] for r in rows]
    assert rows[6]["seconds"] >= before
    if algorithm == "fedbuff":
        assert state.version == 6  # 20 updates are 6 buffers of 3 and 2 updates


def test_reply_to_a_killed_server_is_not_taken_by_the_next(tmp_path):
    """Even where the grid hands it over: it answers none of the new server's messages."""
    federation = Federation(recipe(), checkpoint=tmp_path / "server.ckpt")
    federation.server._hand_out(federation.simulator.get_node_ids())
    (old,) = federation.simulator.pull_messages(list(federation.server.jobs))
    federation.start_server(tmp_path / "server.ckpt")
    federation.server._take(old)
    assert federation.server.state.updates == 0
    assert "reply to no open job" in federation.journal.of("refused")[0]["reason"]
