"""Checkpoints: written at the disk's speed, read into any world size, stage and format, never trusted unchecked."""
