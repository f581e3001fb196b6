"""Seconds of collectives over NVLink and the network, by the bytes and the group.

A ring all-gather of B bytes over n ranks moves B (n - 1) / n through each link in n - 1 hops. NCCL
has three protocols, with different latencies and fractions of the bandwidth; the fastest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from titanlite_planner.hardware import Cluster
from titanlite_planner.time.efficiency import Efficiency

# (fraction of the bandwidth, microseconds of a hop over NVLink, over the network, of the launch):
# LL, LL128 and Simple in NCCL's tuning model (src/graph/tuning.cc, 2.19)
PROTOCOLS = ((0.5, 0.6, 2.7, 6.6), (0.92, 1.9, 4.0, 14.0), (1.0, 3.4, 14.0, 8.4))
# of the bandwidth of an all-gather, over links: 60 and 67 % of the peak for NCCL's all-to-all on 8
# B200 (github.com/MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json)
ALL_TO_ALL = 0.89
# DeepEP's kernels, with what they send on: 218 GB/s for rows of 4 KB, 643 for 14 KB, of 900
ONCE_PER_RANK = 0.5
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
        protocols = (SOCKET,) if self.cluster.gpu.is_cpu else PROTOCOLS
        return min(
            moved / (bandwidth * fraction) + 1e-6 * (launch + inside * hop + outside * far)
            for fraction, hop, far, launch in protocols
        )

    def exposed(self, communication: float, compute: float) -> float:
        """Seconds of `communication` that `compute` seconds do not hide."""
        return max(0.0, communication - (compute if self.cluster.overlaps else 0.0))

    def dispatch(
        self, token_bytes: float, active: int, size: int, stride: int, once_per_rank: bool = False
    ) -> float:
        """Seconds until tokens of `token_bytes` bytes have reached `active` experts each.

        Experts are equally likely, and divided over `size` ranks. Usually a token is sent for each
        of its experts. `once_per_rank`: once to each rank that has one of them, and once over the
        network to each other domain, where it is sent on (DeepSeek-V3, arXiv 2412.19437, 3.2.2).
        """
        if size <= 1:
            return 0.0
        members = self._members(size, stride)
        domains = size / members
        if once_per_rank:
            outside = (domains - 1) * (1 - (1 - 1 / domains) ** active)
            inside = (members - 1) * domains * (1 - (1 - 1 / size) ** active)
        else:
            outside = active * (size - members) / size
            inside = active * (members - 1) / size
        machine, efficiency = self.cluster.machine, self.efficiency
        network = machine.network_gbit_per_s * 1e9 / 8 * efficiency.network
        link = machine.link_gb_per_s * 1e9 * efficiency.link
        rate = ONCE_PER_RANK if once_per_rank else ALL_TO_ALL
        longest = max(outside / network, inside / link / rate)
        return token_bytes * longest + 1e-6 * (14.0 + size / 4)

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
