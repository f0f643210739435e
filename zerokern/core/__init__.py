"""What every layer may import: errors, the environment table, units, and the native loader."""
