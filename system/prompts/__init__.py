"""Prompts: data sources, their exact quotas and order, and the one place where chat templates and tokenizers run.

``PromptStream`` is the whole of it: a pure function from (seed, position) to a tokenised ``Prompt``.
"""

from system.prompts.settings import DataSourceSettings, named_sources
from system.prompts.stream import PromptStream, PromptStreamFactory, SourceSummary
from system.prompts.tokens import load_tokenizer

__all__ = [
    "DataSourceSettings",
    "PromptStream",
    "PromptStreamFactory",
    "SourceSummary",
    "load_tokenizer",
    "named_sources",
]
