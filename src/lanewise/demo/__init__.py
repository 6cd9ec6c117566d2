"""The demo: wrong labels in handwritten digits, found with per-sample gradients; `python -m lanewise.demo`."""
