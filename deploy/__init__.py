"""Running Triptych on clusters."""
