"""The worker pool: a supervisor with its worker processes."""

from inference.pool.devices import check_present, check_sharing, parse_devices
from inference.pool.supervisor import Supervisor

__all__ = ["Supervisor", "check_present", "check_sharing", "parse_devices"]
