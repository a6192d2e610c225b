"""What this machine is: NUMA nodes, GPUs with their PCI addresses and nodes, memory headroom, NVLink fabric."""

from egmctl.topology.bdf import Bdf
from egmctl.topology.model import ROLES, Gpu, NumaNode, Topology, load_topology, save_topology
from egmctl.topology.read import read_topology

__all__ = ["ROLES", "Bdf", "Gpu", "NumaNode", "Topology", "load_topology", "read_topology", "save_topology"]
