"""The stream between rollout workers and learner: leases out, finished groups in, full steps to the learner.

``StreamCore`` is the stream in this process; ``start_stream`` in ``system.stream.actor`` puts one into a Ray actor, and
``StreamClient`` is that actor as workers and the driver see it. Core and client have the same methods.
"""

from system.stream.client import StreamClient
from system.stream.core import StreamCore, TakenStep

__all__ = ["StreamClient", "StreamCore", "TakenStep"]
