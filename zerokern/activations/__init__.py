"""Recomputes, offloads, slices and tiles activations: `zk.recompute`, `keep=`, `micro=`, `zk.tile`."""
