"""What every layer may import: errors, the environment table, and the native loader."""
