"""The same server and client code on Flower's own runtimes."""

import pytest
import torch

from lightning_collider.federated.flower import apps
from lightning_collider.federated.run import train
from lightning_collider.federated.state import Journal, read_rows
from lightning_collider.training.config import to_yaml
from tests.federated.small import Federation, recipe, same_weights


class InOrder:
    """A grid that hands replies over in the order of a schedule of (part of the data, job).

    `next_job` is needed because a part has no name before its first reply: replies that came too
    early are kept back.
    """

    def __init__(self, grid, schedule):
        self.grid, self.schedule, self.kept = grid, list(schedule), []
        self.get_node_ids, self.push_messages = grid.get_node_ids, grid.push_messages

    def pull_messages(self, ids):
        kept = {reply.metadata.reply_to_message_id for reply in self.kept}
        asked = [i for i in ids if i not in kept]
        self.kept += self.grid.pull_messages(asked) if asked else []
        for reply in self.kept:
            assert not reply.has_error(), reply.error
            if self.schedule and reply.content["report"]["client"] == self.schedule[0]:
                del self.schedule[0]
                self.kept.remove(reply)
                return [reply]
        return []
