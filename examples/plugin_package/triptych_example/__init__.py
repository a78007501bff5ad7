"""What a Triptych plug-in package holds: one module per objective, divergence or reward."""
