"""zerokern at work: the demo, and the small GPT that it, the benchmarks and many tests train. See README.md."""
