"""Measurements: speeds as ratios side by side in one run, each with its command and machine. Tests assert none."""
