"""Mixture of experts: which experts a token goes to, and what they compute. Knows no model."""
