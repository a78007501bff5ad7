"""The vLLM engine, in processes of its own (``RolloutEngine``) or in a thread of this one (``LocalEngine``).

With the weight receiver, the only place that knows vLLM's Python API; vLLM is imported when an engine starts.
Token ids in, token ids out. Every request carries a seed, so samples do not depend on the batch they run in, and a
cache salt of the current version, so that the prefix cache never crosses a version.
"""

from rollout_workers.engine.arguments import check_backend, engine_arguments
from rollout_workers.engine.local import LocalEngine
from rollout_workers.engine.processes import RolloutEngine

__all__ = ["LocalEngine", "RolloutEngine", "check_backend", "engine_arguments"]
