"""This machine as a cluster, with what the engine takes of its hosts.

The probe of `cluster/`, whose workers also run the engine (`dispatch.py`). Imports no torch: the workers do.
"""

from __future__ import annotations

from functools import partial

from trainplan.cluster.probe.probe import probe as _probe

probe = partial(_probe, worker="trainplan.engine.dispatch")
