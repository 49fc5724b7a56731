"""A Serve request router that tells its own process of the replicas, and can send a call to one of them.

Serve keeps the list of a deployment's running replicas current in every process that holds a handle to it, inside the
handle's request router. This one passes the list on to whoever watches `Replicas`, and sends a call that has a
`Pin` among its arguments to exactly that replica: the router sees them before they leave the process.
"""

import random

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rayllm.serving.pins import Pin, replicas_of


class EngineRequestRouter(RequestRouter):
    """Routes pinned calls to their replica, and others to the less busy of two."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas that a call may go to; called again after a pause where they are none."""
        if pending_request is None:
            return [_two_of(candidate_replicas)]
        # Without this a pinned call whose replica is gone would spin.
        pending_request.routing_context.should_backoff = True
        for argument in (*pending_request.args, *pending_request.kwargs.values()):
            if isinstance(argument, Pin):
                return [[r for r in candidate_replicas if r.replica_id.unique_id == argument.replica_id]]
        return [_two_of(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when the running replicas change."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Serve when a call finds a replica dead, before the controller knows."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        running = frozenset(replica_id.unique_id for replica_id in self.curr_replicas)
        replicas_of(self._deployment_id.app_name, self._deployment_id.name).tell(running)


def _two_of(candidates: list[RunningReplica]) -> list[RunningReplica]:
    return random.sample(candidates, min(2, len(candidates)))
