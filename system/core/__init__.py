"""What all rooms share: records, errors, clocks, deadlines, protocols. Imports no room and nothing heavy."""
