"""What this repository runs: lists of commands, and spaces of settings that are tuned; scripts/study.py runs them."""
