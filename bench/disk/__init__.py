"""Disks: who moves bytes between a file and memory fastest, with how much CPU, and how many reach the device."""
