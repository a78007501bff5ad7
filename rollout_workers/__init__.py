"""Rollout workers: the vLLM engine, the worker around it, and its Ray actor."""
