"""The `zerokern` command: info, bench, demo."""
