"""What vLLM is asked for, and what its answers mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_workers.contract import EngineOutput, GenerationFailed


def sampling_parameters(temperature: float, seed: int, max_tokens: int) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def scoring_parameters() -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=False,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def as_output(name: str, request_id: str, answer: Any, tokenizer: Any) -> EngineOutput:
    """Checks and converts what vLLM answered; every token must carry a log-prob and a version."""
    sample = answer.outputs[0]
    tokens = list(sample.token_ids)
    if sample.finish_reason not in ("stop", "length") or not tokens:
        raise GenerationFailed(f"{name}: request {request_id} ended with '{sample.finish_reason}', not with an answer")
    versions = [int(span.version) for span in sample.weight_versions or () for _ in range(span.start, span.end)]
    logprobs = list(sample.logprobs.logprobs)
    if len(versions) != len(tokens) or len(logprobs) != len(tokens):
        raise GenerationFailed(
            f"{name}: request {request_id}: {len(tokens)} tokens, {len(logprobs)} log-probs, {len(versions)} versions"
        )
    known = [token for token in tokens if token < len(tokenizer)]
    text = tokenizer.decode(known, skip_special_tokens=True).encode("utf-8", "replace").decode("utf-8")
    return EngineOutput(tokens, logprobs, versions, sample.finish_reason, text)


def as_probe(tokens: Sequence[int], answer: Any) -> list[float]:
    return [answer.prompt_logprobs[index][token].logprob for index, token in enumerate(tokens) if index > 0]
