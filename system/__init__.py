"""Triptych's composition root: imports every room, and nothing heavy by itself."""
