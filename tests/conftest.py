"""For all tests: property tests have no deadline per example, since a busy machine would fail them at random."""

from hypothesis import settings

settings.register_profile("triptych", deadline=None)
settings.load_profile("triptych")
