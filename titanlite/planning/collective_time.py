"""Seconds of collectives over NVLink and the network, by the bytes and the group.

A ring all-gather of B bytes over n ranks moves B (n - 1) / n through each link in n - 1 hops. NCCL
has three protocols, with different latencies and fractions of the bandwidth; the fastest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.planning.efficiency import Efficiency
from titanlite.planning.hardware import Cluster

# (fraction of the bandwidth, microseconds of a hop over NVLink, over the network, of the launch):
# LL, LL128 and Simple in NCCL's tuning model (src/graph/tuning.cc, 2.19)
PROTOCOLS = ((0.5, 0.6, 2.7, 6.6), (0.92, 1.9, 4.0, 14.0), (1.0, 3.4, 14.0, 8.4))
SOCKET = (1.0, 10.0, 50.0, 30.0)  # gloo between processes of one machine


@dataclass(frozen=True)
class CollectiveTimes:
    """Times of collectives on one cluster."""

    cluster: Cluster
    efficiency: Efficiency

    def all_gather(self, total_bytes: float, size: int, stride: int) -> float:
        """Seconds until each of `size` ranks, `stride` apart, has all `total_bytes`.

        A reduce-scatter of as many bytes takes as long, and an all-reduce twice as long.
        """
        if size <= 1 or not total_bytes:
            return 0.0
        domains = -(-size // self._members(size, stride))
        moved = total_bytes * (size - 1) / size
        bandwidth = self._bandwidth(size, stride)
        inside, outside = size - domains, domains - 1 if domains > 1 else 0
        protocols = PROTOCOLS if self.cluster.gpu.name != "CPU" else (SOCKET,)
        return min(
            moved / (bandwidth * fraction) + 1e-6 * (launch + inside * hop + outside * far)
            for fraction, hop, far, launch in protocols
        )

    def all_to_all(self, bytes_of_rank: float, size: int, stride: int) -> float:
        """Seconds until each rank has sent `bytes_of_rank`, in equal parts, to `size` ranks."""
        if size <= 1:
            return 0.0
        members = self._members(size, stride)
        outside = bytes_of_rank * (size - members) / size
        inside = bytes_of_rank * (members - 1) / size
        machine, efficiency = self.cluster.machine, self.efficiency
        network = machine.network_gbit_per_s * 1e9 / 8 * efficiency.network
        link = machine.link_gb_per_s * 1e9 * efficiency.link
        return max(outside / network, inside / link) + 1e-6 * (14.0 + size / 4)

    def send(self, sent_bytes: float, stride: int) -> float:
        """Seconds to send to the rank whose number is higher by `stride`."""
        return sent_bytes / self._bandwidth(2, stride) + 15e-6

    def _members(self, size: int, stride: int) -> int:
        """Ranks of the group in one domain."""
        return min(size, max(1, self.cluster.machine.link_domain // stride))

    def _bandwidth(self, size: int, stride: int) -> float:
        bandwidth = self.cluster.bandwidth(size, stride)
        link = self.cluster.machine.link_gb_per_s * 1e9 * self.efficiency.link
        if not self.cluster.crosses_network(size, stride):
            return link
        return min(link, bandwidth * self.efficiency.network)
