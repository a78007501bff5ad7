"""The frozen reference model: log-probs at the run's temperature, by the learner's own model code.

Nothing here ever sees a policy version, so its answers cannot depend on one. Implements ``system.core.protocols
.Reference`` without waiting; ``learner.reference_actor`` serves it to several callers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from learner.layout_choice import choose_layout
from learner.logprobs import LogprobModel, completion_logprobs
from learner.model import load_causal_lm
from learner.settings import ReferenceSettings
from learner.token_batch import ScoredRow
from system.core.errors import DataError
from system.core.model import ModelSettings
from system.core.protocols import TokenRow


class ReferenceModel:
    """Answers in the calling thread; one call at a time."""

    def __init__(self, model: ModelSettings, settings: ReferenceSettings, temperature: float) -> None:
        """
        Raises:
            ConfigError: the model cannot be loaded, or not be used as asked.
        """
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        causal_lm = load_causal_lm(model, device)
        causal_lm.requires_grad_(False)
        causal_lm.eval()
        self._model = LogprobModel(causal_lm, temperature)
        self._model.check_head()
        choose_layout(self._model, settings.layout, "reference.layout")
        self._batch_tokens = settings.batch_tokens

    def logprobs(self, rows: Sequence[TokenRow]) -> list[np.ndarray]:
        """One float32 array of completion length per row, in order.

        Raises:
            DataError: a row without prompt tokens; nothing predicts its first completion token.
        """
        empty = [index for index, row in enumerate(rows) if len(row.prompt_tokens) == 0]
        if empty:
            raise DataError(
                f"reference log-probs: rows {empty} have no prompt tokens; nothing predicts their first token"
            )
        scored = [ScoredRow(row.prompt_tokens, row.completion_tokens) for row in rows]
        return completion_logprobs(self._model, scored, self._batch_tokens)
