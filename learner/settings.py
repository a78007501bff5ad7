"""Settings of the learner pool and of the reference worker (recipe keys ``learner:`` and ``reference:``)."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from system.core.settings import Settings

Schedule = Literal["constant", "linear", "cosine"]
LayoutSetting = Literal["auto", "shared_prefix", "padded"]
Optimizer = Literal["adamw", "adamw_8bit"]


class LearnerSettings(Settings):
    """How the policy is trained: how many ranks, how their memory is cut, and the optimiser."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    workers: int = Field(default=1, ge=1)
    """Learner ranks, one process (and one GPU, where there are any) each."""
    zero: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage: over the ranks it splits 0 nothing, 1 optimiser state, 2 also gradients, 3 also weights."""
    tokens_per_microbatch: int = Field(default=4096, ge=1)
    """Most tokens, padding included, that one forward and backward pass holds. A longer row goes alone."""
    layout: LayoutSetting = "auto"
    """How rows are laid out: shared_prefix computes a prompt once for all its completions, padded once for each. auto
    shares where the model computes the same log-probs so, which is tried at the start."""
    epochs_per_step: int = Field(default=1, ge=1)
    """Passes over the groups of a step."""
    minibatches_per_step: int = Field(default=1, ge=1)
    """Optimiser updates per pass; each sees its share of the step's groups, in issue order."""
    optimizer: Optimizer = "adamw"
    """adamw_8bit keeps AdamW's moments in 8 bits, 2 bytes a parameter instead of 8; it needs bitsandbytes."""
    offload_optimizer: bool = False
    """On GPUs, under ZeRO 1 to 3: keep float32 weights, moments and summed gradients in the machine's memory and update
    there; slower, and most of the optimiser's memory on the GPU is free."""
    learning_rate: float = Field(default=1e-6, gt=0.0)
    """Peak learning rate of AdamW."""
    schedule: Schedule = "constant"
    """After the warm-up: constant, or down to zero over the run's updates (linear, or half a cosine)."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser updates over which the learning rate rises linearly; the first has learning_rate / warmup_steps."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay of matrices; biases and norms have none."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Share of its first moment that AdamW keeps at an update."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """The same of its second moment."""
    epsilon: float = Field(default=1e-8, gt=0.0)
    """AdamW's epsilon."""
    gradient_clip: float = Field(default=1.0, ge=0.0)
    """Largest norm of the whole gradient; 0 switches clipping off."""
    entropy: bool = False
    """Write the policy's entropy as learner/entropy into the metrics: nats, mean over the step's trained tokens, taken
    from the logits of the learning pass. One more pass over them, no gradient."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and compute the layer again in the backward pass: less memory, a third more time."""
    restarts: int = Field(default=2, ge=0)
    """How often the pool is started again from the last checkpoint after a rank was lost."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads per rank; null leaves torch's choice."""
    start_deadline_s: float = Field(default=300.0, gt=0.0)
    """Longest time from creating the ranks to the loaded model on all of them."""
    step_deadline_s: float = Field(default=1800.0, gt=0.0)
    """Longest time for one step."""
    checkpoint_deadline_s: float = Field(default=1800.0, gt=0.0)
    """Longest time for writing or reading a checkpoint."""
    collective_timeout_s: float = Field(default=1800.0, gt=0.0)
    """How long a rank waits for the others in one collective operation."""

    @model_validator(mode="after")
    def _waits_nest(self) -> LearnerSettings:
        if self.collective_timeout_s < self.checkpoint_deadline_s:
            raise ValueError(
                f"collective_timeout_s {self.collective_timeout_s:g} is shorter than checkpoint_deadline_s "
                f"{self.checkpoint_deadline_s:g}: a slow checkpoint would break the ranks' connection"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_can_be_offloaded(self) -> LearnerSettings:
        if self.offload_optimizer and self.zero == 0:
            raise ValueError("offload_optimizer: true needs zero 1, 2 or 3; ZeRO 0 keeps everything on the GPU")
        if self.offload_optimizer and self.optimizer == "adamw_8bit":
            raise ValueError("offload_optimizer: true and optimizer adamw_8bit exclude each other; use adamw")
        return self


class ReferenceSettings(Settings):
    """The frozen model whose log-probs anchor the policy."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    workers: int = Field(default=1, ge=1)
    """Workers that share the requests, one process (and one GPU, where there are any) each."""
    path: str | None = Field(default=None, min_length=1)
    """Model that the policy is compared with, or taught by: a folder or a hub id, with the policy's tokenizer. Null:
    the policy's own model at its start."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens, padding included, in one forward pass."""
    layout: LayoutSetting = "auto"
    """As learner.layout."""
    collect_s: float = Field(default=0.005, ge=0.0)
    """How long the worker waits for further requests before it runs a batch."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; null leaves torch's choice."""
    start_deadline_s: float = Field(default=300.0, gt=0.0)
    """Longest time from creating the workers to the loaded model on all of them."""
    deadline_s: float = Field(default=120.0, gt=0.0)
    """Longest time from a request to its answer, waiting for the batch included."""
