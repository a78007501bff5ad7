"""From a question to token ids: chat template and tokenizer, each applied once.

A rendered template already holds its special tokens, so none are added to it; plain text gets those that the
tokenizer adds by itself (a beginning-of-sequence token, for the models that were trained with one).
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from system.core.deadlines import first_line
from system.core.errors import ConfigError, DataError
from system.core.protocols import ChatMessages
from system.prompts.settings import DataSourceSettings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")


def load_tokenizer(path: str) -> Any:
    """The tokenizer of the model at ``path`` (a folder, or a hub id).

    Raises:
        ConfigError: there is none.
    """
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model.path: {path} holds no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); "
            "save the model's tokenizer there, or bring the model in with `triptych model import`"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as failure:
        raise ConfigError(f"model.path: no tokenizer could be loaded from {path}: {first_line(failure)}") from failure


class PromptEncoder:
    """Turns the questions of one source into token ids."""

    def __init__(self, settings: DataSourceSettings, tokenizer: Any) -> None:
        """
        Raises:
            ConfigError: the source wants a chat template and the model has none.
        """
        self._settings = settings
        self._tokenizer = tokenizer
        has_template = bool(getattr(tokenizer, "chat_template", None))
        wanted = settings.chat_template
        if isinstance(wanted, dict) and not has_template:
            raise ConfigError(
                f"data '{settings.name}': chat_template is given, but the model's tokenizer has no template; "
                "use chat_template: false for plain text"
            )
        self.applies_template = has_template and wanted is not False
        if settings.system_prompt is not None and not self.applies_template:
            raise ConfigError(
                f"data '{settings.name}': system_prompt needs a chat template, and the model's tokenizer has none"
            )
        self._arguments = dict(wanted) if isinstance(wanted, dict) else {}

    def question(self, value: Any, where: str) -> str | ChatMessages:
        """The question as a reward is shown it: text, or chat messages with the system prompt in front.

        Args:
            value: what stands in the prompt column.
            where: names the row in errors.

        Raises:
            DataError: it is neither text nor a list of ``{role, content}``.
        """
        if isinstance(value, str):
            return value + self._settings.suffix
        if not isinstance(value, list) or not value:
            raise DataError(f"{where}: a prompt must be text or a list of chat messages, got {type(value).__name__}")
        messages: ChatMessages = []
        for message in value:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise DataError(f"{where}: each chat message needs 'role' and 'content', got {message!r:.80}")
            messages.append(dict(message))
        if not self.applies_template:
            raise DataError(f"{where}: chat messages need a chat template, and none is applied (see chat_template)")
        if self._settings.suffix:
            for message in reversed(messages):
                if message["role"] == "user" and isinstance(message["content"], str):
                    message["content"] += self._settings.suffix
                    break
        if self._settings.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._settings.system_prompt})
        return messages

    def render(self, question: str | ChatMessages) -> str:
        """The text that is tokenised."""
        if not self.applies_template:
            return str(question)
        messages = question
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
            if self._settings.system_prompt is not None:
                messages = [{"role": "system", "content": self._settings.system_prompt}, *messages]
        begun = messages[-1]["role"] == "assistant"
        arguments = {"add_generation_prompt": not begun, "continue_final_message": begun, **self._arguments}
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
        except Exception as failure:  # a template is a program of the model's maker: it may raise anything
            raise DataError(
                f"data '{self._settings.name}': the model's chat template fails: {first_line(failure)}"
            ) from failure

    def tokens(self, rendered: str, where: str) -> tuple[int, ...]:
        """Token ids of a rendered prompt.

        Args:
            where: names the row in errors.

        Raises:
            DataError: the text is not valid Unicode, or gives no token: nothing would predict the first answer token.
        """
        try:
            rendered.encode()
        except UnicodeEncodeError as failure:
            raise DataError(f"{where}: the prompt is not valid Unicode text: {failure}") from None
        encoded = self._tokenizer(rendered, add_special_tokens=not self.applies_template, verbose=False)
        if not encoded["input_ids"]:
            raise DataError(f"{where}: the prompt is empty; a model needs at least one token to go on from")
        return tuple(encoded["input_ids"])


def context_tokens(config: dict[str, Any]) -> int | None:
    """How many positions a model has, from its ``config.json``; None where it does not say."""
    inner = config.get("text_config")
    for source in (config, inner if isinstance(inner, dict) else {}):
        for key in ("max_position_embeddings", "n_positions", "max_seq_len"):
            with contextlib.suppress(TypeError, ValueError, KeyError):
                return int(source[key])
    return None
