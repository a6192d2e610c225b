"""Put and get straight between a caller's buffers and a pool's DRAM."""

from egmctl.consumer.engine import Timing
from egmctl.consumer.flow import FlowOptions
from egmctl.consumer.session import Session
from egmctl.consumer.store import EgmStore
from egmctl.consumer.transfer import BatchTransfer, Transfer

__all__ = ["BatchTransfer", "EgmStore", "FlowOptions", "Session", "Timing", "Transfer"]
