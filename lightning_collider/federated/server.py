"""The server's loop: work out, replies in, in the order in which they come.

Asynchronous: each reply is taken when it arrives and its client gets new work at once. It uses a
Flower Grid's `get_node_ids`, `push_messages` and `pull_messages`, and a clock; so it runs alike on
Flower and in the simulator. A client has one job at a time. Its reply is matched with the job by
Flower's message id, and the job is closed by its first reply, so that nothing is counted twice; a
restarted server has no open jobs, and its clients start anew from the checkpoint's weights.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Message

from lightning_collider.federated.algorithms import Algorithm, Update, Weights
from lightning_collider.federated.clock import Clock
from lightning_collider.federated.jobs import GONE, Job, Mailbox, checked_weights
from lightning_collider.federated.messages import (
    CORRECT,
    ORDER,
    REPORT,
    TRAIN,
    BadMessage,
    CorrectOrder,
    Report,
    TrainOrder,
    pack,
    to_record,
    unpack,
    weights_of,
)
from lightning_collider.federated.settings import ServerConfig
from lightning_collider.federated.state import (
    Journal,
    ServerState,
    load_checkpoint,
    save_checkpoint,
)
from lightning_collider.federated.tasks import Task

log = logging.getLogger(__name__)
POLL = 0.1  # seconds between two looks for replies


class Server:
    """Trains a task on the clients of a grid.

    Args:
        grid: a Flower Grid, or the simulator.
        clock: tells the time of the rows in the journal.
        task: gives the initial weights, and judges the global model.
        algorithm: what is done with an update.
        config: limits and intervals.
        journal: receives the rows.
        checkpoint: file to go on from, if it is there, and to write; None: no checkpoints.
    """

    def __init__(
        self,
        grid: Mailbox,
        clock: Clock,
        task: Task,
        algorithm: Algorithm,
        config: ServerConfig,
        journal: Journal,
        checkpoint: Path | None = None,
        say: Callable[[str], None] = log.info,
    ):
        self.grid, self.clock, self.task, self.algorithm = grid, clock, task, algorithm
        self.config, self.journal, self.checkpoint, self.say = config, journal, checkpoint, say
        self.module = task.module()  # receives the global weights to be judged
        if checkpoint is not None and checkpoint.is_file():
            self.state = load_checkpoint(checkpoint, algorithm, journal)
        else:
            journal.cut(0)
            self.state = ServerState(weights_of(self.module))
        self.jobs: dict[str, Job] = {}  # by message id
        self.refusals: dict[int, int] = {}  # by node id, in a row
        self._earlier = self.state.seconds - clock.now()
        self._alone_since: float | None = None
        self._judged_version, self._judged_updates = -1, 0
        self._saved = self.state.updates
        self._broadcast: tuple[int, ArrayRecord] | None = None

    def run(self) -> ServerState:
        """Train until a limit is reached.

        Raises RuntimeError when no client is there, or fit for work, for `patience` seconds.
        """
        self._evaluate()
        started = self.state.updates > 0
        while not self._finished():
            nodes = sorted(self.grid.get_node_ids())
            started = started or len(nodes) >= self.config.min_clients
            if started:
                self._hand_out(nodes)
            self._check_patience()
            replies = list(self.grid.pull_messages(list(self.jobs))) if self.jobs else []
            for reply in replies:
                self._take(reply)
            self._give_up_late_jobs()
            if self.algorithm.synchronous and not self.jobs:
                self._adopt(self.algorithm.close_round(self.state.weights))
            self._keep_record()
            if not replies:
                self.clock.wait(POLL)
        self._evaluate()
        self._save()
        return self.state

    def seconds(self) -> float:
        """Time on this server's clock, over all restarts."""
        return self._earlier + self.clock.now()

    def _finished(self) -> bool:
        if self.algorithm.synchronous and self.jobs:
            return False
        most, longest = self.config.max_updates, self.config.max_seconds
        return (most is not None and self.state.updates >= most) or (
            longest is not None and self.seconds() >= longest
        )

    # Work out

    def _hand_out(self, nodes: list[int]) -> None:
        if self.algorithm.synchronous and self.jobs:
            return
        busy = {job.node for job in self.jobs.values()}
        for node in nodes:
            if node not in busy and self.refusals.get(node, 0) < self.config.max_refusals:
                self._order_training(node)

    def _order_training(self, node: int) -> None:
        state, algorithm = self.state, self.algorithm
        number = state.next_job.get(node, 0)
        state.next_job[node] = number + 1
        order = TrainOrder(number, state.version, algorithm.extra_steps, not algorithm.corrects)
        base = state.weights if algorithm.keeps_base else None
        deadline = self.seconds() + self.config.job_timeout
        job = Job(node, number, state.version, base, deadline, state.version)
        self._send(job, TRAIN, pack(ORDER, order, self._global_record()))

    def _order_correction(self, job: Job) -> None:
        version = self.state.version
        plan = self.algorithm.correction(version, job.version)
        order = CorrectOrder(job.number, version, plan.steps, plan.lam, plan.temperature)
        job.correcting = True
        job.corrected_version = version if plan.steps else job.version
        self._send(job, CORRECT, pack(ORDER, order, self._global_record() if plan.steps else None))

    def _global_record(self) -> ArrayRecord:
        """The global weights as they are sent, made once a version."""
        if self._broadcast is None or self._broadcast[0] != self.state.version:
            self._broadcast = (self.state.version, to_record(self.state.weights))
        return self._broadcast[1]

    def _send(self, job: Job, kind: str, content: Any) -> None:
        message = Message(content, job.node, kind, ttl=self.config.job_timeout)
        ids = [i for i in self.grid.push_messages([message]) if i]
        if ids:
            self.jobs[ids[0]] = job
        else:
            self._note("lost", job.node, job.number, "its message could not be sent")

    # Replies in

    def _take(self, reply: Message) -> None:
        job = self.jobs.pop(reply.metadata.reply_to_message_id, None)
        if job is None:
            node = reply.metadata.src_node_id
            self._note("refused", node, None, "a reply to no open job: a second one, or too late")
            return
        if reply.has_error():
            event = "lost" if reply.error.code in GONE else "refused"
            self._note(event, job.node, job.number, str(reply.error.reason))
            return
        try:
            report = unpack(reply, REPORT, Report)
            if report.job != job.number:
                raise BadMessage(f"it reports job {report.job}, not {job.number}")
            if self.algorithm.corrects and not job.correcting:
                self.state.work += report.work
                self._order_correction(job)
            else:
                self._count(job, report, checked_weights(reply, self.state.weights))
        except BadMessage as error:
            self._note("refused", job.node, job.number, str(error))

    def _count(self, job: Job, report: Report, weights: Weights) -> None:
        """Take an update in. Raises BadMessage when it was counted before, or is too old."""
        state = self.state
        if state.counted.get(job.node, -1) >= job.number:
            raise BadMessage("this job's update was counted before")
        update = Update(
            weights, job.base, job.version, job.corrected_version, examples=report.examples
        )
        delay = self.algorithm.delay(state.version, update)
        if self.config.max_delay is not None and delay > self.config.max_delay:
            raise BadMessage(f"its delay of {delay} is above max_delay={self.config.max_delay}")
        new = self.algorithm.receive(state.weights, state.version, update)
        state.counted[job.node] = job.number
        state.updates += 1
        if job.correcting:
            state.correction_work += report.work
        else:
            state.work += report.work
        self.refusals.pop(job.node, None)
        self.journal.write(
            "update",
            seconds=self.seconds(),
            client=job.node,
            part=report.client,
            job=job.number,
            delay=state.version - job.version,
            share=self.algorithm.share(delay),
            corrected=job.corrected_version > job.version,
            loss=report.loss,
            updates=state.updates,
        )
        self._adopt(new)

    def _adopt(self, weights: Weights | None) -> None:
        if weights is not None:
            self.state.weights = weights
            self.state.version += 1

    # What goes wrong

    def _note(self, event: str, node: int, job: int | None, reason: str) -> None:
        """Log what a client did wrong, or that it is lost; the first counts against it."""
        if event == "refused" and job is not None:
            self.refusals[node] = self.refusals.get(node, 0) + 1
            if self.refusals[node] == self.config.max_refusals:
                reason += f". After {self.config.max_refusals} in a row it gets no more work"
        log.warning("client %s, job %s: %s: %s", node, job, event, reason)
        self.journal.write(event, seconds=self.seconds(), client=node, job=job, reason=reason)

    def _give_up_late_jobs(self) -> None:
        now = self.seconds()
        for message_id, job in list(self.jobs.items()):
            if now > job.deadline:
                del self.jobs[message_id]
                reason = f"no reply within job_timeout={self.config.job_timeout} s"
                self._note("lost", job.node, job.number, reason)

    def _check_patience(self) -> None:
        """Raise RuntimeError when there has been no work for anyone for too long."""
        if self.jobs:
            self._alone_since = None
            return
        now = self.seconds()
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since >= self.config.patience:
            known = len(list(self.grid.get_node_ids()))
            barred = sum(n >= self.config.max_refusals for n in self.refusals.values())
            raise RuntimeError(
                f"no client at work for server.patience={self.config.patience} s: {known} are "
                f"connected (server.min_clients={self.config.min_clients}), {barred} were refused "
                "too often. See the rows `refused` in metrics.jsonl"
            )

    # Records

    def _keep_record(self) -> None:
        """Evaluate and save where it is due."""
        every = self.config.evaluate_every
        if self.state.updates // every > self._judged_updates // every:
            self._evaluate()
        if self.state.updates - self._saved >= self.config.checkpoint_every:
            self._save()

    def _evaluate(self) -> None:
        """Judge the global model, unless this version was judged before."""
        state = self.state
        if state.version == self._judged_version:
            return
        self._judged_version, self._judged_updates = state.version, state.updates
        self.module.load_state_dict(state.weights, strict=False)
        numbers = self.task.evaluate(self.module)
        self.journal.write(
            "evaluation",
            seconds=self.seconds(),
            version=state.version,
            updates=state.updates,
            work=state.work,
            correction_work=state.correction_work,
            **numbers,
        )
        shown = "  ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        self.say(
            f"version {state.version}  updates {state.updates}  {self.seconds():.0f} s  {shown}"
        )

    def _save(self) -> None:
        self._saved = self.state.updates
        if self.checkpoint is not None:
            self.state.seconds = self.seconds()
            save_checkpoint(
                self.checkpoint, self.state, self.algorithm, rows=len(self.journal.rows)
            )
