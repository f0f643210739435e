"""What is sharded, where each element lives, and the hooks that move it; see README.md in this folder."""
