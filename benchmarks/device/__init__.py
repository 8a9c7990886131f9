"""`make device`: everything that only a GPU can show, in one command of a few minutes. See docs/gpus.md."""
