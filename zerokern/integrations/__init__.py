"""zerokern inside of the frameworks that people train with; each module imports its framework, nothing else does."""
