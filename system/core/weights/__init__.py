"""Both ends of a weight sync's wire. ``wire`` and ``sender`` import torch only; ``receiver`` alone imports vLLM."""
