"""Judging completions: functions, verifiers, and the processes they run in. Usable without Ray, torch or vLLM."""
