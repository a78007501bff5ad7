"""What an objective learns from beside its own samples: a frozen reference or teacher, and offline pairs. Checks only.

Called by ``system.recipe.checks``; nothing is started.
"""

from __future__ import annotations

from typing import Any

from system.core.errors import ConfigError
from system.core.model import ModelSettings
from system.prompts.pairs import OfflinePairsFactory
from system.prompts.tokens import load_tokenizer
from system.recipe.model_facts import ModelFacts, read_model
from system.recipe.settings import Recipe


def reference_settings(recipe: Recipe) -> ModelSettings:
    """The model that reference workers hold."""
    path = recipe.reference.path
    return recipe.model if path is None else recipe.model.model_copy(update={"path": path})


def check_reference(recipe: Recipe, objective: Any, model: ModelFacts) -> ModelFacts:
    """The facts of the reference model.

    Raises:
        ConfigError: the objective needs a teacher and none is named, one is named and not needed, or it has another
            tokenizer than the policy.
    """
    path = recipe.reference.path
    if path is None:
        if objective.needs_teacher:
            raise ConfigError(
                f"reference.path: objective {objective.name} learns from another model; name its folder "
                "(the policy's own model at the start would teach it nothing)"
            )
        return model
    if "reference" not in objective.needs:
        raise ConfigError(f"reference.path has no effect: objective {objective.name} needs no reference; leave it out")
    try:
        facts = read_model(path)
        theirs = load_tokenizer(path).get_vocab()
    except ConfigError as failure:
        raise ConfigError(str(failure).replace("model.path", "reference.path")) from None
    ours = load_tokenizer(recipe.model.path).get_vocab()
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        shown = ", ".join(map(repr, differing[:3]))
        raise ConfigError(
            f"reference.path: {path} has another tokenizer than model.path {recipe.model.path} ({len(differing):,} "
            f"tokens differ, among them {shown}); log-probs of the same tokens are compared, so both must share it"
        )
    return facts


def offline_pairs(recipe: Recipe, objective: Any, model: ModelFacts) -> OfflinePairsFactory | None:
    """Where the objective's offline pairs come from; None: it takes none.

    Raises:
        ConfigError: the objective takes pairs and none are named.
        DataError: the file cannot give pairs.
    """
    if not objective.takes_pairs:
        return None
    options = objective.settings
    if options.offline_file is None:
        raise ConfigError(
            f"objective.offline_file: {objective.name} also learns from preference pairs; name a .jsonl or .parquet "
            "file with the columns prompt, chosen and rejected, or use objective f_grpo"
        )
    factory = OfflinePairsFactory(
        file=options.offline_file,
        model_path=recipe.model.path,
        seed=recipe.run.seed,
        pairs_per_step=options.offline_pairs_per_step or recipe.stream.groups_per_step,
        longest_tokens=model.context_tokens,
    )
    if factory.pairs_per_step < recipe.learner.minibatches_per_step:
        raise ConfigError(
            f"objective.offline_pairs_per_step: {factory.pairs_per_step} pairs do not reach all "
            f"learner.minibatches_per_step {recipe.learner.minibatches_per_step}; raise it"
        )
    factory()
    return factory
