"""Hypothesis draws new examples on every run, except under CI, where a run must not depend on luck."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
